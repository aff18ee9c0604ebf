"""What the keeper says to the trainer. Which process: the keeper, which must never wait for a busy trainer."""

import socket
from collections import deque

from holdfast.local.wire import MOST_BYTES, Message, encode


class Outbox:
    def __init__(self, control: socket.socket) -> None:
        """`control` does not block."""
        self._control = control
        # The socket takes no message that is longer than its buffer, now or later.
        self._most = min(MOST_BYTES, control.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2)
        self._unsaid: deque[bytes] = deque()

    def say(self, message: Message | None = None) -> None:
        """Never blocks: what the socket does not take now is said at the next tick."""
        if message is not None:
            self._unsaid.append(encode(message, self._most))
        while self._unsaid:
            try:
                self._control.send(self._unsaid[0])
            except OSError:  # it is full; or the trainer is gone, and the keeper will notice
                return
            self._unsaid.popleft()
