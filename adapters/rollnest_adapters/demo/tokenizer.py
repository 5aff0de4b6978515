"""The small policy's tokenizer: characters. It loads nothing heavy, because it goes to actors."""

from __future__ import annotations

from collections.abc import Sequence

from rollnest import Message

__all__ = ["CHARACTERS", "EOS", "PAD", "CharTokenizer"]

CHARACTERS = "0123456789+-=:;.c "
PAD, EOS = 0, 1
_FIRST = 2


class CharTokenizer:
    """One id for each character; a user's message is the whole prompt.

    Serves the engine's `Tokenizer` protocol.
    """

    vocab_size: int = _FIRST + len(CHARACTERS)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The end-of-sequence id."""
        return frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text.

        Raises:
            ValueError: A character is not in the vocabulary.
        """
        unknown = set(text).difference(CHARACTERS)
        if unknown:
            raise ValueError(f"{min(unknown)!r} is not in the vocabulary {CHARACTERS!r}")
        return [_FIRST + CHARACTERS.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without padding and end."""
        return "".join(CHARACTERS[i - _FIRST] for i in ids if i >= _FIRST)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> list[int]:
        """Returns the last message's ids: there is no template."""
        return self.encode(messages[-1]["content"])

    def render_suffix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        closed: bool,
    ) -> list[int] | None:
        """Returns `None`: nothing follows an answer."""
        return None
