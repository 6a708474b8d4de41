"""The websocket of one log: `/ws/jobs/{id}/logs/{role}/{index}?offset=N&attempt=A&lossless=1`.

First a text frame `{"type": "log", "offset": …, "size": …}`, then binary frames with the exact bytes in
order. Further text frames: `waiting` (no file yet, or the cluster is out of reach), `truncated` (the
next bytes stand at offset 0), `gap` (a range left out for a viewer who does not keep up; REST has it),
`end` with the task's verdict, `error` with a code and a sentence. Offsets below 0 count from the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any
from urllib.parse import parse_qs

from django.db import DatabaseError
from django.utils import translation

from accounts.websockets import GuardedConsumer
from clusters.errors import AuthFailed, ClusterError
from core.messages import _
from core.threads import in_thread
from core.translation import told
from jobs.logs.follower import Ending, Follower, View, followers_of_this_loop
from jobs.logs.reading import Log, LogNotFound, find_log, resolve_offset
from jobs.models import Job

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
CLOSE_DONE = 1000
CLOSE_FAILED = 1011
RETRY_S = (1.0, 2.0, 5.0, 10.0)
# A viewer whose connection took nothing for so long, and who is so far behind, skips to the end.
STALL_S = 2.0
MAX_LAG_BYTES = 4 * 1024 * 1024
KEPT_AFTER_GAP_BYTES = 64 * 1024


class LogConsumer(GuardedConsumer):
    _log: Log | None = None
    _job: Job
    _follower: Follower | None = None
    _view: View | None = None
    _runner: asyncio.Task[None] | None = None

    def permitted(self) -> bool:
        address = self.scope["url_route"]["kwargs"]
        try:
            self._job, log = find_log(
                user=self.user,
                job_id=address["job_id"],
                role=address["role"],
                index=int(address["index"]),
                attempt=self._number("attempt"),
            )
        except LogNotFound:
            return False
        if self._log is None:
            self._log = log
        return True

    def _number(self, name: str) -> int | None:
        query = parse_qs(self.scope.get("query_string", b"").decode("latin-1"))
        value = query.get(name, [""])[0]
        return int(value) if value.lstrip("-").isdecimal() and len(value) < 19 else None

    async def opened(self) -> None:
        self._runner = asyncio.create_task(self._run())

    async def closed(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
        await self._leave()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Nothing is expected from the viewer; whatever comes is dropped."""

    async def _tell(self, kind: str, **fields: Any) -> None:
        with translation.override(self.language):
            fields |= {name: told(fields[name]) for name in ("reason", "message") if name in fields}
        await self.send(text_data=json.dumps({"type": kind, **fields}, ensure_ascii=False))

    # --- the stream -----------------------------------------------------------------------------

    async def _run(self) -> None:
        offset = self._number("offset") or 0
        tries = 0
        while True:
            try:
                log = await self._wait_for_submission()
                if log is None:
                    return
                await self._stream(log, offset)
                await self._leave()
                return
            except AuthFailed as problem:
                await self._fail("refused", problem.user_message)
                return
            except ClusterError as problem:
                # The cluster is away, or the file may not be read at the moment: go on later.
                offset = self._place(offset)
                await self._leave()
                await self._tell("waiting", offset=offset, reason=problem.user_message)
                if not problem.retryable and tries >= len(RETRY_S):
                    await self._fail("unreadable", problem.user_message)
                    return
                await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
                tries += 1
            except DatabaseError:
                # Restarted, or away for a moment: the viewer keeps the socket and the place.
                logger.warning(
                    "the database does not answer a log's viewer",
                    exc_info=True,
                    extra={"action": "log_socket_database"},
                )
                offset = self._place(offset)
                await self._leave()
                await asyncio.sleep(RETRY_S[0])
            except Exception:
                # A socket that nobody serves any more must not look like a quiet log.
                logger.exception("a log's websocket failed", extra={"action": "log_socket_failed"})
                await self.close(code=CLOSE_FAILED)
                return

    def _place(self, asked: int) -> int:
        return self._view.offset if self._view is not None else asked

    async def _wait_for_submission(self) -> Log | None:
        """The log as soon as there is an attempt. None: the job ended before there was one."""
        told = False
        while self._log is None:
            job = await in_thread(Job.objects.get, pk=self._job.pk)
            if job.is_ended:
                await self._tell("log", offset=0, size=0)
                await self._tell("end", state=job.state.lower(), exit_code=None)
                await self.close(code=CLOSE_DONE)
                return None
            if not told:
                told = True
                await self._tell("waiting", offset=0, reason=_("The job has not started yet."))
            await asyncio.sleep(LOOK_EVERY_S)
            await in_thread(self.permitted)
        return self._log

    async def _stream(self, log: Log, asked: int) -> None:
        follower = self._follower = await followers_of_this_loop().join(log)
        size = follower.end
        first = self._view is None
        view = self._view = View(follower, resolve_offset(asked, size) if first else asked)
        if first:
            await self._tell("log", offset=view.offset, size=size, attempt=log.attempt.number)
        while True:
            ending = follower.known_ending
            if ending is not None and view.offset >= (ending.size or 0):
                await self._finish(ending)
                return
            frame = await view.next(LOOK_EVERY_S)
            if frame is None:
                await follower.ending()
            elif frame.kind == "data":
                await self._send_bytes(view, frame.data)
            elif frame.kind == "truncated":
                await self._tell("truncated")
            else:
                await self._tell("waiting", offset=view.offset, reason=frame.reason)

    async def _send_bytes(self, view: View, data: bytes) -> None:
        """Returns when the connection took the bytes: `gateway.server` holds `send` back."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        await self.send(bytes_data=data)
        stalled = loop.time() - began > STALL_S
        if stalled and view.lag > MAX_LAG_BYTES and not self._number("lossless"):
            missed_from, resumed_at = view.offset, view.end - KEPT_AFTER_GAP_BYTES
            view.skip_to(resumed_at)
            await self._tell("gap", **{"from": missed_from, "to": resumed_at})

    async def _finish(self, ending: Ending) -> None:
        if ending.size is None:
            await self._fail(
                "gone", _("This log is no longer on the cluster: its files were removed.")
            )
            return
        await self._tell("end", **ending.verdict)
        await self.close(code=CLOSE_DONE)

    async def _fail(self, code: str, message: str) -> None:
        await self._tell("error", code=code, message=message)
        await self.close(code=CLOSE_DONE)

    async def _leave(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None and self._log is not None:
            await followers_of_this_loop().leave(self._log, follower)
