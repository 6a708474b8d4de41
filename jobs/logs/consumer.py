"""The websocket of one log: `/ws/jobs/{id}/logs/{role}/{index}?offset=N&attempt=A&lossless=1`.

The text frame `{"type": "log", "offset": …, "size": …}` announces the log; binary frames with the log's bytes in
order follow. Further types of text frames: `waiting` (there is no file yet, or the cluster is unreachable),
`truncated` (the next bytes are at offset 0), `gap` (a range that was skipped for a slow viewer and can be read by
REST; not with `lossless=1`), `end` (how the task ended), `error` (a code and a message). A negative offset counts from
the end of the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any
from urllib.parse import parse_qs

from django.db import DatabaseError
from django.utils import translation

from accounts.websockets import AuthenticatedConsumer
from clusters.errors import AuthFailed, ClusterError
from core.messages import _
from core.threads import run_in_thread
from core.translation import translate
from jobs.logs.follower import Ending, Follower, Viewer, get_followers
from jobs.logs.reading import Log, LogNotFound, find_log, resolve_offset
from jobs.models import Job

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
CLOSE_DONE = 1000
CLOSE_FAILED = 1011
RETRY_DELAYS_S = (1.0, 2.0, 5.0, 10.0)
# If sending one frame to a viewer took longer than STALL_THRESHOLD_S, and the viewer is more than MAX_LAG_BYTES behind
# the end of the log, it continues RESUME_BEFORE_END_BYTES before the end.
STALL_THRESHOLD_S = 2.0
MAX_LAG_BYTES = 4 * 1024 * 1024
RESUME_BEFORE_END_BYTES = 64 * 1024


class LogConsumer(AuthenticatedConsumer):
    _log: Log | None = None
    _job: Job
    _follower: Follower | None = None
    _viewer: Viewer | None = None
    _stream_task: asyncio.Task[None] | None = None

    def check_permission(self) -> bool:
        address = self.scope["url_route"]["kwargs"]
        try:
            self._job, log = find_log(
                user=self.user,
                job_id=address["job_id"],
                role=address["role"],
                index=int(address["index"]),
                attempt=self._query_int("attempt"),
            )
        except LogNotFound:
            return False
        if self._log is None:
            self._log = log
        return True

    def _query_int(self, name: str) -> int | None:
        query = parse_qs(self.scope.get("query_string", b"").decode("latin-1"))
        value = query.get(name, [""])[0]
        return int(value) if value.lstrip("-").isdecimal() and len(value) < 19 else None

    async def on_open(self) -> None:
        self._stream_task = asyncio.create_task(self._run())

    async def on_close(self) -> None:
        if self._stream_task is not None:
            self._stream_task.cancel()
        await self._leave_follower()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Ignore messages of the client."""

    async def _send_message(self, kind: str, **fields: Any) -> None:
        with translation.override(self.language):
            fields |= {
                name: translate(fields[name]) for name in ("reason", "message") if name in fields
            }
        await self.send(text_data=json.dumps({"type": kind, **fields}, ensure_ascii=False))

    # --- the stream -----------------------------------------------------------------------------

    async def _run(self) -> None:
        offset = self._query_int("offset") or 0
        failure_count = 0
        while True:
            try:
                log = await self._wait_for_submission()
                if log is None:
                    return
                await self._stream(log, offset)
                await self._leave_follower()
                return
            except AuthFailed as error:
                await self._fail("refused", error.user_message)
                return
            except ClusterError as error:
                # The cluster is unreachable or the file unreadable at the moment: try again after a delay.
                offset = self._current_offset(offset)
                await self._leave_follower()
                await self._send_message("waiting", offset=offset, reason=error.user_message)
                if not error.retryable and failure_count >= len(RETRY_DELAYS_S):
                    await self._fail("unreadable", error.user_message)
                    return
                await asyncio.sleep(RETRY_DELAYS_S[min(failure_count, len(RETRY_DELAYS_S) - 1)])
                failure_count += 1
            except DatabaseError:
                # The database may be restarting: keep the websocket and its position, and try again.
                logger.warning(
                    "the database does not answer; log viewer waits",
                    exc_info=True,
                    extra={"action": "log_socket_database_unavailable"},
                )
                offset = self._current_offset(offset)
                await self._leave_follower()
                await asyncio.sleep(RETRY_DELAYS_S[0])
            except Exception:
                # Close the websocket, because no frames would follow although the client expects them.
                logger.exception("a log's websocket failed", extra={"action": "log_socket_failed"})
                await self.close(code=CLOSE_FAILED)
                return

    def _current_offset(self, requested: int) -> int:
        return self._viewer.offset if self._viewer is not None else requested

    async def _wait_for_submission(self) -> Log | None:
        """Wait until the job has an attempt and return its log; None if the job ended without an attempt."""
        announced = False
        while self._log is None:
            job = await run_in_thread(Job.objects.get, pk=self._job.pk)
            if job.is_ended:
                await self._send_message("log", offset=0, size=0)
                await self._send_message("end", state=job.state.lower(), exit_code=None)
                await self.close(code=CLOSE_DONE)
                return None
            if not announced:
                announced = True
                await self._send_message(
                    "waiting", offset=0, reason=_("The job has not started yet.")
                )
            await asyncio.sleep(POLL_INTERVAL_S)
            await run_in_thread(self.check_permission)
        return self._log

    async def _stream(self, log: Log, requested: int) -> None:
        follower = self._follower = await get_followers().join(log)
        size = follower.end
        is_first_stream = self._viewer is None  # False after a failure
        offset = resolve_offset(requested, size) if is_first_stream else requested
        viewer = self._viewer = Viewer(follower, offset)
        if is_first_stream:
            await self._send_message(
                "log", offset=viewer.offset, size=size, attempt=log.attempt.number
            )
        while True:
            ending = follower.ending
            if ending is not None and viewer.offset >= (ending.size or 0):
                await self._send_end(ending)
                return
            frame = await viewer.next(POLL_INTERVAL_S)
            if frame is None:
                await follower.check_ending()
            elif frame.kind == "data":
                await self._send_bytes(viewer, frame.data)
            elif frame.kind == "truncated":
                await self._send_message("truncated")
            else:
                await self._send_message("waiting", offset=viewer.offset, reason=frame.reason)

    async def _send_bytes(self, viewer: Viewer, data: bytes) -> None:
        """Send bytes. If that took long and the viewer is far behind, skip to near the end of the log.

        `send` returns when the connection has accepted the bytes (back-pressure, see `gateway.server`).
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        await self.send(bytes_data=data)
        stalled = loop.time() - started > STALL_THRESHOLD_S
        lag_bytes = viewer.end - viewer.offset
        if stalled and lag_bytes > MAX_LAG_BYTES and not self._query_int("lossless"):
            missed_from, resumed_at = viewer.offset, viewer.end - RESUME_BEFORE_END_BYTES
            viewer.offset = resumed_at
            await self._send_message("gap", **{"from": missed_from, "to": resumed_at})

    async def _send_end(self, ending: Ending) -> None:
        if ending.size is None:
            await self._fail(
                "gone", _("This log is no longer on the cluster: its files were removed.")
            )
            return
        await self._send_message("end", **ending.result)
        await self.close(code=CLOSE_DONE)

    async def _fail(self, code: str, message: str) -> None:
        await self._send_message("error", code=code, message=message)
        await self.close(code=CLOSE_DONE)

    async def _leave_follower(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None and self._log is not None:
            await get_followers().leave(self._log, follower)
