"""The pass that removes files with secrets from the directories of ended attempts, and writes them again after a requeue.

The batch script removes them at its end. It cannot if it was killed or never started, and must not if Slurm may requeue the
job. `Attempt.secret_files` records that they may exist: it is set before they are written, and cleared after they have been
removed. Both steps may be repeated, and are until they succeed.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from django.db.models import Q, QuerySet

from clusters.connections import transport_for
from clusters.errors import RemoteFileError
from clusters.passes import Pass, PassContext
from clusters.transport.base import FileToWrite
from core.messages import msg
from jobs.models import Attempt
from jobs.script.paths import SECRET_NAMES, SECRETS_FILE, AttemptPaths
from jobs.script.render import RenderError
from jobs.store.secrets import SecretsUnreadable
from jobs.sync.attempt_files import load_render_options, render_attempt
from jobs.sync.owner_threads import OwnerThreads

logger = logging.getLogger(__name__)

ATTEMPTS_PER_COMMAND = 100
ATTEMPTS_PER_ROUND = 500
REMOVE_TIMEOUT_S = 30.0

_ENDED = Q(phase__in=[Attempt.Phase.ENDED, Attempt.Phase.REFUSED])
_WRITE_AGAIN = Q(phase=Attempt.Phase.LIVE, secret_files=Attempt.SecretFiles.WANTED)
# Arguments: the number of names, the names, directories. Prints the directories that have none of the names any more.
_REMOVE_SCRIPT = r"""
count=$1; shift
names=
while [ "$count" -gt 0 ]; do names="$names $1"; shift; count=$((count - 1)); done
for dir; do
  left=
  for name in $names; do rm -rf -- "$dir/$name" || left=yes; done 2>/dev/null
  [ -n "$left" ] || printf '%s\n' "$dir"
done
:
"""


class SecretFilesPass(Pass):
    name = "secret_files"

    def __init__(self, context: PassContext) -> None:
        super().__init__(context)
        self._threads = OwnerThreads(context, "secret_files")

    def has_work(self) -> bool:
        return self._due_attempts().exists()

    def run(self) -> bool:
        attempts_by_user: dict[str, list[Attempt]] = defaultdict(list)
        rows = self._due_attempts().order_by("id").only("unix_user", "work_dir", "phase")
        for attempt in rows[:ATTEMPTS_PER_ROUND]:
            attempts_by_user[attempt.unix_user].append(attempt)
        for unix_user, attempts in attempts_by_user.items():
            chunk = attempts[:ATTEMPTS_PER_COMMAND]
            self._threads.start(unix_user, partial(self._process, unix_user, chunk))
        return False

    def run_to_completion(self) -> bool:
        self.run()
        self._threads.wait(REMOVE_TIMEOUT_S)
        return False

    def close(self) -> None:
        self._threads.close()

    def _due_attempts(self) -> QuerySet[Attempt]:
        marked = Attempt.objects.filter(cluster=self.context.cluster).exclude(secret_files="")
        return marked.filter(_ENDED | _WRITE_AGAIN)

    def _process(self, unix_user: str, attempts: Sequence[Attempt]) -> None:
        """Remove or write the files of one Unix user's attempts."""
        for attempt in attempts:
            if attempt.phase == Attempt.Phase.LIVE:
                self._write(unix_user, attempt.pk)
        ended = [attempt for attempt in attempts if attempt.phase != Attempt.Phase.LIVE]
        if ended:
            self._remove(unix_user, ended)

    def _remove(self, unix_user: str, attempts: Sequence[Attempt]) -> None:
        self.context.stats.count_command("secret_files")
        ids_by_dir = {attempt.work_dir: attempt.pk for attempt in attempts}
        argv = ["sh", "-c", _REMOVE_SCRIPT, "remove", str(len(SECRET_NAMES)), *SECRET_NAMES]
        result = transport_for(self.context.cluster, unix_user).run(
            [*argv, *ids_by_dir], timeout_s=REMOVE_TIMEOUT_S
        )
        removed = [ids_by_dir[path] for path in result.text.split("\n") if path in ids_by_dir]
        with self.context.lease.fenced_transaction():
            Attempt.objects.filter(pk__in=removed).update(secret_files=Attempt.SecretFiles.NONE)
        if len(removed) < len(attempts):
            raise RemoteFileError(
                msg("secret-files.not-removed", "A file with secrets could not be removed.")
            )

    def _write(self, unix_user: str, attempt_id: int) -> None:
        attempt = Attempt.objects.select_related("job__namespace", "cluster").get(pk=attempt_id)
        paths = AttemptPaths.from_dir(attempt.work_dir)
        options = load_render_options(attempt.cluster, unix_user)
        try:
            rendered = render_attempt(attempt.job, paths, unix_user=unix_user, options=options)
        except (RenderError, SecretsUnreadable, ValueError) as error:
            logger.warning(
                "secrets of attempt %s: %s", attempt, error, extra={"action": "secrets_unreadable"}
            )
            rendered = {}
        if SECRETS_FILE in rendered:
            file = FileToWrite(SECRETS_FILE, rendered[SECRETS_FILE].encode())
            transport_for(self.context.cluster, unix_user).write_files(attempt.work_dir, [file])
        with self.context.lease.fenced_transaction():
            wanted = Attempt.objects.filter(pk=attempt.pk, secret_files=Attempt.SecretFiles.WANTED)
            wanted.update(secret_files=Attempt.SecretFiles.PRESENT)
