"""A tokenizer whose every id is chosen by the test: pieces are bytes, so a character may be split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollnest import Message

__all__ = ["EOS", "ToyTokenizer"]

EOS = 9
_BYTES = 300  # byte b is id _BYTES + b where no piece says otherwise


class ToyTokenizer:
    """Its template is: the content of each message, an EOS after the assistant's, then `header`.

    Args:
        pieces: Text of ids, by id; encoding takes the longest piece that fits.
        stops: Ids that end a turn.
        header: What the template puts where the assistant is to go on.
        after_stop: What the template puts between a stop token and the next message.
        rewrites: Whether the template rewrites what came before, so that it has no suffix.
    """

    def __init__(
        self,
        pieces: Mapping[int, str | bytes] | None = None,
        *,
        stops: Sequence[int] = (EOS,),
        header: Sequence[int] = (),
        after_stop: Sequence[int] = (),
        rewrites: bool = False,
    ) -> None:
        self._pieces = {
            id_: piece.encode() if isinstance(piece, str) else piece
            for id_, piece in (pieces or {}).items()
        }
        self._stops = frozenset(stops)
        self._header = list(header)
        self._after_stop = list(after_stop)
        self._rewrites = rewrites
        self.rendered = 0

    @property
    def stop_token_ids(self) -> frozenset[int]:
        return self._stops

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), list[int]()
        longest = sorted(self._pieces.items(), key=lambda item: -len(item[1]))
        while data:
            for id_, piece in longest:
                if piece and data.startswith(piece):
                    ids.append(id_)
                    data = data[len(piece) :]
                    break
            else:
                ids.append(_BYTES + data[0])
                data = data[1:]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._piece, ids)).decode(errors="replace")

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> list[int]:
        self.rendered += 1
        ids = list[int]()
        for message in messages:
            ids += self.encode(message["content"])
            if message["role"] == "assistant":
                ids += [EOS, *self._after_stop]
        return ids + self._header

    def render_suffix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        closed: bool,
    ) -> list[int] | None:
        if self._rewrites:
            return None
        ids = [*([] if closed else [EOS]), *self._after_stop]
        for message in messages:
            ids += self.encode(message["content"])
        return ids + self._header

    def _piece(self, id_: int) -> bytes:
        if id_ in self._pieces:
            return self._pieces[id_]
        return bytes([id_ - _BYTES]) if _BYTES <= id_ < _BYTES + 256 else b""
