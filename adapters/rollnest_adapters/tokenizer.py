"""A transformers tokenizer and its chat template, behind the engine's `Tokenizer` protocol.

A conversation is rendered once, to ids; what the policy sampled is never decoded and encoded again. What comes after
its turn is found by the suffix rule: render a made-up conversation with and without the new messages, and take what
is new. That is only right if the first is a beginning of the second, so it is checked, and a template that rewrites
what came before has no suffix.

Needs the extra `transformers`; importing this module doesn't import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from rollnest import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTokenizer"]

_THOUGHT = "a made-up thought"


class ChatTokenizer:
    """Serves the engine's `Tokenizer` protocol from a transformers tokenizer.

        tokenizer = ChatTokenizer(AutoTokenizer.from_pretrained(path))

    Thread-safe as long as nothing else changes the tokenizer's padding or truncation.

    Attributes:
        tokenizer: The transformers tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Iterable[int] = (),
        reasoning: tuple[str, str] | None = ("<think>", "</think>"),
    ) -> None:
        """Wraps a tokenizer.

        Args:
            tokenizer: A transformers tokenizer; with a chat template, if messages are to be rendered.
            stop_token_ids: Ids that end a turn, besides the tokenizer's end-of-sequence id. Give what the model's
                generation config has.
            reasoning: What stands around the policy's reasoning. A template that drops or moves the reasoning of
                earlier turns has no suffix then, so that the conversation goes on in a new segment, as the template
                wants it. `None`: the policy doesn't reason, so only what happens to plain answers counts.
        """
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self._tokenizer = cast("Any", tokenizer)
        eos = cast("int | None", self._tokenizer.eos_token_id)
        self._stop_token_ids: frozenset[int] = frozenset(stop_token_ids)
        if eos is not None:
            self._stop_token_ids |= {eos}
        for token_id in self._stop_token_ids:
            if not 0 <= token_id < len(self._tokenizer):
                raise ValueError(
                    f"stop_token_ids must be in range({len(self._tokenizer)}), got {token_id}"
                )
        self._reasoning = reasoning
        # The first call takes padding and truncation off the tokenizer, while no other thread is in it.
        self.encode("")
        self._answers = self._two_answers()

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end a turn of the assistant."""
        return self._stop_token_ids

    def encode(self, text: str) -> list[int]:
        """Returns the ids of raw text, without special tokens added."""
        return cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, all decoded at once, without special tokens."""
        return cast(
            "str",
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
        )

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] | None = None
    ) -> list[int]:
        """Returns the ids of a conversation up to where the assistant is to go on.

        Exactly what the template says is in them, its beginning-of-sequence token too; nothing is added or cut.

        Raises:
            ValueError: The tokenizer has no chat template.
            jinja2.TemplateError: The template refuses the conversation.
        """
        return self._render(messages, tools, prompt=True)

    def render_suffix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        closed: bool,
    ) -> list[int] | None:
        """Returns what follows an assistant turn when `messages` come after it; see `rollnest.abc.Tokenizer`.

        A closed turn's suffix starts after the last stop token of the template's end of turn. If that end has none
        (the turn ended with a stop token that the template doesn't use), the suffix has the whole end.
        """
        if self._answers is None:
            return None
        one, other = (self._made_up(answer) for answer in self._answers)
        try:
            before = self._render(one, tools, prompt=False)
            varied = self._render(other, tools, prompt=False)
            after = self._render([*one, *messages], tools, prompt=True)
            kept = self._keeps_reasoning(one, tools)
        except TemplateError:
            return (
                None  # It refuses the made-up conversation; `render` finds out about the real one.
            )
        if not kept or after[: len(before)] != before:
            return None
        end = len(before) - _common_end(before, varied)
        if self._text(before[end - 1 : end]) != self._answers[0]:
            return None  # The answer's last token reaches into what follows.
        tail = before[end:]
        if closed:
            tail = tail[_after_last(tail, self._stop_token_ids) :]
        return tail + after[len(before) :]

    def _made_up(self, answer: str) -> list[Message]:
        if self._reasoning is not None:
            start, stop = self._reasoning
            answer = f"{start}\n{_THOUGHT}\n{stop}\n\n{answer}"
        return [{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]

    def _two_answers(self) -> tuple[str, str] | None:
        """Returns two answers of one known token each; conversations that differ in them show where an answer ends."""
        found: dict[int, str] = {}
        words = (word for word in self._tokenizer.get_vocab() if word.isalnum())
        for word in chain(ascii_letters + digits, words):
            ids = self.encode(word)
            if len(ids) == 1 and ids[0] != self._tokenizer.unk_token_id and self._text(ids) == word:
                found.setdefault(ids[0], word)
            if len(found) == 2:
                one, other = found.values()
                return one, other
        return None

    def _text(self, ids: Sequence[int]) -> str:
        # Some tokenizers mark a word's beginning by a space in its token.
        return cast("str", self._tokenizer.decode(list(ids))).lstrip()

    def _keeps_reasoning(
        self, conversation: Sequence[Message], tools: Sequence[Message] | None
    ) -> bool:
        if self._reasoning is None:
            return True
        return _THOUGHT in self._tokenizer.apply_chat_template(
            _dicts(conversation), tools=_dicts(tools), tokenize=False
        )

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, prompt: bool
    ) -> list[int]:
        return cast(
            "list[int]",
            self._tokenizer.apply_chat_template(
                _dicts(messages),
                tools=_dicts(tools),
                add_generation_prompt=prompt,
                tokenize=True,
                return_dict=False,
            ),
        )


def _dicts(items: Sequence[Message] | None) -> list[dict[str, Any]] | None:
    return None if items is None else [dict(item) for item in items]


def _common_end(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many ids two lists have in common at their ends."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _after_last(ids: Sequence[int], marks: frozenset[int]) -> int:
    """Returns where what follows the last of some ids begins; 0 if there is none."""
    return next((i + 1 for i in reversed(range(len(ids))) if ids[i] in marks), 0)
