"""RESP2, the protocol that Valkey and Redis speak: commands to bytes, and bytes to replies.

Payloads are not copied on their way: commands keep memoryviews as they are for a gathering write, and bulk
replies can be received straight into the memory where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstrata.tiers.valkey.errors import ReplyError, ServerBrokenError

Bytes = bytes | bytearray | memoryview
Argument = Bytes | str | int | tuple[Bytes, ...]  # a tuple: the parts of one argument
Command = Sequence[Argument]
Reply = None | int | bytes | list["Reply"] | ReplyError

_LINE_BYTES = 64 << 10  # longest line that a server sends in earnest
_LARGE = 4096  # bytes from which an argument is not worth a copy
_AT_ONCE = 4096  # bytes fetched where small things are read: of a large value, so many are copied at most
_MOST_BULK = 512 << 20  # what servers accept at most
_DEEPEST = 8


def script(text: str, keys: Sequence[Argument], arguments: Sequence[Argument] = ()) -> Command:
    """A command that runs a Lua script; in a cluster its keys must have one hash tag."""
    return ("EVAL", text, len(keys), *keys, *arguments)


def encode(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """The bytes of commands one after the other, in pieces; large arguments are pieces of their own."""
    pieces: list[bytes | memoryview] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            parts = argument if isinstance(argument, tuple) else (_raw(argument),)
            small += b"$%d\r\n" % sum(map(len, parts))
            for part in parts:
                if len(part) < _LARGE:
                    small += part
                else:
                    pieces += [bytes(small), memoryview(part)]
                    small.clear()
            small += b"\r\n"
    pieces.append(bytes(small))
    return pieces


def _raw(argument: Bytes | str | int) -> Bytes:
    if isinstance(argument, str):
        return argument.encode()
    if isinstance(argument, int):
        return b"%d" % argument
    return argument


class ReplyReader:
    """Reads replies from a source of bytes.

    receive(memory, whole): fills memory from its start and returns how many bytes came, at least one; all of
    it if `whole`. Raises what the source raises.
    """

    def __init__(self, receive: Callable[[memoryview, bool], int]) -> None:
        self._receive = receive
        self._buffer = bytearray(_LINE_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0

    def reply(self) -> Reply:
        """The next reply, whatever it is. Raises ServerBrokenError for what is none."""
        return self._reply(0)

    def bulk_length(self) -> int | ReplyError | None:
        """Begin to read a bulk reply: its length, None where there is no value, or the error in its place.

        The bytes are then fetched by `take`, and `end_bulk` closes it.
        """
        line = self._line()
        if line[:1] == b"$":
            length = _length(line[1:])
            return None if length < 0 else length
        if line[:1] == b"-":
            return ReplyError(line[1:].decode(errors="replace"))
        raise ServerBrokenError(f"a value was asked for and {bytes(line[:20])!r} came")

    def take(self, memory: memoryview) -> None:
        """The next bytes of a bulk reply, exactly as many as the memory has room for."""
        have = min(len(memory), self._end - self._begin)
        memory[:have] = self._view[self._begin : self._begin + have]
        self._begin += have
        if have < len(memory):
            self._receive(memory[have:], True)

    def pass_over(self, count: int) -> None:
        """Bytes of a bulk reply that nobody wants."""
        while count > 0:
            if self._begin == self._end:
                self._fill()
            step = min(count, self._end - self._begin)
            self._begin += step
            count -= step

    def end_bulk(self) -> None:
        """What follows a bulk reply."""
        while self._end - self._begin < 2:
            self._fill()
        if self._buffer[self._begin : self._begin + 2] != b"\r\n":
            raise ServerBrokenError("a value is longer than it said")
        self._begin += 2

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        match kind:
            case b"+":
                return bytes(rest)
            case b"-":
                return ReplyError(rest.decode(errors="replace"))
            case b":":
                return _number(rest)
            case b"$":
                length = _length(rest)
                if length < 0:
                    return None
                raw = bytearray(length)
                self.take(memoryview(raw))
                self.end_bulk()
                return bytes(raw)
            case b"*":
                count = _number(rest)
                if depth >= _DEEPEST:
                    raise ServerBrokenError("a reply is nested too deeply")
                return None if count < 0 else [self._reply(depth + 1) for _ in range(count)]
        raise ServerBrokenError(f"{bytes(line[:20])!r} is no reply; is this a Valkey server?")

    def _line(self) -> bytearray:
        searched = self._begin
        while (at := self._buffer.find(b"\r\n", searched, self._end)) < 0:
            searched = max(self._begin, self._end - 1)
            moved = self._begin
            self._fill()
            searched -= moved - self._begin
        line = self._buffer[self._begin : at]
        self._begin = at + 2
        return line

    def _fill(self) -> None:
        """Some more bytes into the buffer."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._buffer):
            if not self._begin:
                raise ServerBrokenError("a line of a reply is too long; is this a Valkey server?")
            kept = self._end - self._begin
            self._buffer[:kept] = self._buffer[self._begin : self._end]
            self._begin, self._end = 0, kept
        self._end += self._receive(self._view[self._end : self._end + _AT_ONCE], False)


def _number(raw: bytearray) -> int:
    try:
        number = int(raw)
    except ValueError:
        raise ServerBrokenError(f"{bytes(raw[:20])!r} is no number") from None
    return number


def _length(raw: bytearray) -> int:
    length = _number(raw)
    if length > _MOST_BULK:
        raise ServerBrokenError(f"a value of {length} bytes is longer than can be")
    return length
