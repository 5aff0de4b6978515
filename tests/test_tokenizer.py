"""The chat tokenizer: templates of several families over small tokenizers that are made here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import rollnest.abc
from rollnest_adapters.tokenizer import ChatTokenizer

quick = settings(max_examples=50, deadline=None)

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Llama's family: a beginning-of-sequence token in the template, nothing after the end of a turn.
WITH_BOS = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Qwen 3's family: turns before the last question lose their reasoning, and one that is the last gets an empty one.
REWRITING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
  {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
  {%- set reasoning = '' %}
  {%- if '</think>' in message.content %}
    {%- set reasoning = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
  {%- endif %}
  {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
    {%- set content = '<think>\n' + reasoning + '\n</think>\n\n' + content %}
  {%- endif %}
{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# DeepSeek's family: every earlier turn loses its reasoning, wherever it stands.
STRIPPING = CHATML.replace("message.content +", "message.content.split('</think>')[-1] +")

# The end of a turn is no special token, and none at all.
PLAIN = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""

SPECIAL = [
    "<|endoftext|>",
    "<|bos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]


@pytest.fixture(scope="module")
def backend() -> Tokenizer:
    """A byte-level BPE, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [
        "user assistant system tool",
        "the answer is four",
        "what is two and two",
        "<think>\n\n</think>",
    ]
    tokenizer.train_from_iterator(lines * 3, trainer)
    return tokenizer


fast = cast("Callable[..., PreTrainedTokenizerFast]", PreTrainedTokenizerFast)


def id_of(backend: Tokenizer, token: str) -> int:
    found = backend.token_to_id(token)
    assert found is not None
    return found


def chat(
    backend: Tokenizer, template: str, *, eos: str = "<|im_end|>", **options: Any
) -> ChatTokenizer:
    tokenizer = fast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token=eos,
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer, **options)


def spelled(tokenizer: ChatTokenizer, ids: list[int] | None) -> str | None:
    """The text of ids, special tokens shown."""
    return None if ids is None else cast("str", tokenizer.tokenizer.decode(ids))


USER = [{"role": "user", "content": "what is two and two"}]
TOOL = [{"role": "tool", "content": "four"}]
ANSWER = {"role": "assistant", "content": "the answer"}


def test_it_is_a_tokenizer_for_the_engine(backend: Tokenizer) -> None:
    tokenizer: rollnest.abc.Tokenizer = chat(backend, CHATML)
    assert tokenizer.stop_token_ids == {id_of(backend, "<|im_end|>")}


# Rendering


def test_a_conversation_is_rendered_up_to_the_assistants_turn(backend: Tokenizer) -> None:
    tokenizer = chat(backend, CHATML)
    ids = tokenizer.render([*USER, ANSWER, *TOOL])
    assert spelled(tokenizer, ids) == (
        "<|im_start|>user\nwhat is two and two<|im_end|>\n"
        "<|im_start|>assistant\nthe answer<|im_end|>\n"
        "<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"
    )
    assert all(type(i) is int for i in ids)


def test_bug_005_the_templates_bos_stands_once_and_none_is_added(backend: Tokenizer) -> None:
    bos = id_of(backend, "<|bos|>")
    # A tokenizer that adds its own BOS to whatever it encodes, as Llama's does.
    adding = Tokenizer.from_str(backend.to_str())
    adding.post_processor = TemplateProcessing(
        single="<|bos|> $A", pair=None, special_tokens=[("<|bos|>", bos)]
    )
    with_bos = chat(adding, WITH_BOS, eos="<|eot_id|>")
    assert with_bos.tokenizer.encode("x")[0] == bos  # it would
    ids = with_bos.render(USER)
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert bos not in with_bos.encode("x")
    without = chat(adding, CHATML)
    assert bos not in without.render(USER)
    for closed in (True, False):
        suffix = with_bos.render_suffix(TOOL, closed=closed)
        assert suffix is not None
        assert bos not in suffix


def test_tools_reach_the_template(backend: Tokenizer) -> None:
    tokenizer = chat(backend, "{{- tools | length if tools else 'none' }}")
    schema = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert spelled(tokenizer, tokenizer.render(USER)) == "none"
    assert spelled(tokenizer, tokenizer.render(USER, tools=[schema, schema])) == "2"


def test_bug_011_a_long_prompt_is_never_cut(backend: Tokenizer) -> None:
    tokenizer = chat(backend, CHATML)
    cutting = fast(
        tokenizer_object=backend, eos_token="<|im_end|>", model_max_length=8, truncation_side="left"
    )
    cutting.chat_template = CHATML
    messages = [{"role": "user", "content": "what is two " * 50}]
    assert ChatTokenizer(cutting).render(messages) == tokenizer.render(messages)


def test_padding_and_truncation_of_the_tokenizer_are_taken_off(backend: Tokenizer) -> None:
    padding = Tokenizer.from_str(backend.to_str())
    padding.enable_padding(length=64)
    padding.enable_truncation(4)
    tokenizer = chat(padding, CHATML)
    backend_of_its_own = cast("Any", tokenizer.tokenizer).backend_tokenizer
    assert backend_of_its_own.padding is None
    assert backend_of_its_own.truncation is None
    assert tokenizer.encode("what is two and two") == chat(backend, CHATML).encode(
        "what is two and two"
    )


def test_without_a_chat_template_messages_are_refused(backend: Tokenizer) -> None:
    tokenizer = ChatTokenizer(fast(tokenizer_object=backend))
    assert tokenizer.stop_token_ids == frozenset()
    assert tokenizer.encode("two") != []
    with pytest.raises(ValueError, match="chat_template"):
        tokenizer.render(USER)


# Decoding


def test_bug_008_a_character_over_two_tokens_is_decoded_from_the_whole_list(
    backend: Tokenizer,
) -> None:
    tokenizer = chat(backend, CHATML)
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert tokenizer.decode(ids) == "é"
    assert "\ufffd" in tokenizer.decode(ids[:1])


def test_special_tokens_are_not_in_the_text(backend: Tokenizer) -> None:
    tokenizer = chat(backend, CHATML)
    end = id_of(backend, "<|im_end|>")
    ids = memoryview(bytes(0)).cast("i")
    assert tokenizer.decode(ids) == ""
    assert tokenizer.decode([*tokenizer.encode(" a , b ."), end]) == " a , b ."


@quick
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_raw_text_survives_encoding_and_decoding(backend: Tokenizer, text: str) -> None:
    tokenizer = chat(backend, CHATML)
    assert tokenizer.decode(tokenizer.encode(text)) == text


# The suffix rule


def test_bug_014_the_suffix_after_a_stop_token_starts_with_what_the_template_puts_behind_it(
    backend: Tokenizer,
) -> None:
    tokenizer = chat(backend, CHATML)
    suffix = tokenizer.render_suffix(TOOL, closed=True)
    assert (
        spelled(tokenizer, suffix) == "\n<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"
    )


def test_bug_004_the_suffix_of_a_turn_that_was_cut_ends_it_first(backend: Tokenizer) -> None:
    tokenizer = chat(backend, CHATML)
    suffix = tokenizer.render_suffix(TOOL, closed=False)
    assert spelled(tokenizer, suffix) == (
        "<|im_end|>\n<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"
    )


def test_bug_007_a_stop_token_that_the_template_does_not_use_is_followed_by_the_templates_own(
    backend: Tokenizer,
) -> None:
    tokenizer = chat(backend, CHATML, eos="<|endoftext|>")
    suffix = tokenizer.render_suffix(TOOL, closed=True)
    assert suffix == tokenizer.render_suffix(TOOL, closed=False)
    assert suffix is not None
    assert suffix[0] == id_of(backend, "<|im_end|>")


def test_further_stop_tokens_close_a_turn_too(backend: Tokenizer) -> None:
    end, pad = id_of(backend, "<|im_end|>"), id_of(backend, "<|endoftext|>")
    tokenizer = chat(backend, CHATML, eos="<|endoftext|>", stop_token_ids=[end])
    assert tokenizer.stop_token_ids == {end, pad}
    suffix = tokenizer.render_suffix(TOOL, closed=True)
    assert suffix == chat(backend, CHATML).render_suffix(TOOL, closed=True)


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_a_stop_token_outside_the_vocabulary_is_refused(backend: Tokenizer, bad: int) -> None:
    with pytest.raises(ValueError, match=rf"stop_token_ids must be in range\(\d+\), got {bad}"):
        chat(backend, CHATML, stop_token_ids=[bad])


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, PLAIN], ids=["chatml", "bos", "plain"])
@pytest.mark.parametrize("new", [TOOL, USER, [*TOOL, *USER]], ids=["tool", "user", "both"])
def test_where_the_template_rewrites_nothing_prompt_answer_and_suffix_make_the_whole_render(
    backend: Tokenizer, template: str, new: list[dict[str, str]]
) -> None:
    eos = "<|eot_id|>" if template is WITH_BOS else "<|im_end|>"
    tokenizer = chat(backend, template, eos=eos)
    content = "the answer is <think>four</think>"
    sampled = tokenizer.encode(content)
    if template is PLAIN:
        sampled = tokenizer.encode(f" {content}")
    suffix = tokenizer.render_suffix(new, closed=False)
    assert suffix is not None
    whole = tokenizer.render([*USER, {"role": "assistant", "content": content}, *new])
    assert tokenizer.render(USER) + sampled + suffix == whole


@quick
@given(
    content=st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    question=st.text(max_size=20).filter(lambda s: s == s.encode("utf-8", "replace").decode()),
)
def test_the_suffix_holds_the_new_messages_whatever_they_say(
    backend: Tokenizer, content: str, question: str
) -> None:
    tokenizer = chat(backend, CHATML)
    new = [{"role": "tool", "content": content}, {"role": "user", "content": question}]
    suffix = tokenizer.render_suffix(new, closed=False)
    assert spelled(tokenizer, suffix) == (
        f"<|im_end|>\n<|im_start|>tool\n{content}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_bug_003_a_template_that_rewrites_the_turn_before_has_no_suffix(backend: Tokenizer) -> None:
    tokenizer = chat(backend, REWRITING)
    assert tokenizer.render_suffix(USER, closed=True) is None
    assert tokenizer.render_suffix(USER, closed=False) is None


def test_bug_003_an_empty_thought_that_is_put_into_the_last_turn_only_is_noticed(
    backend: Tokenizer,
) -> None:
    # A policy that doesn't reason: the made-up turn is plain, and gets an empty thought when it is the last.
    assert chat(backend, REWRITING, reasoning=None).render_suffix(TOOL, closed=True) is None


def test_bug_002_where_reasoning_is_kept_the_suffix_is_there(backend: Tokenizer) -> None:
    # After a tool's answer, this family keeps the reasoning of the turn.
    tokenizer = chat(backend, REWRITING)
    suffix = tokenizer.render_suffix(TOOL, closed=True)
    assert (
        spelled(tokenizer, suffix) == "\n<|im_start|>tool\nfour<|im_end|>\n<|im_start|>assistant\n"
    )


def test_bug_002_a_template_that_drops_all_reasoning_has_a_suffix_only_for_those_without(
    backend: Tokenizer,
) -> None:
    assert chat(backend, STRIPPING).render_suffix(TOOL, closed=True) is None
    plain = chat(backend, STRIPPING, reasoning=None)
    assert plain.render_suffix(TOOL, closed=True) == chat(backend, CHATML).render_suffix(
        TOOL, closed=True
    )
    other_marks = chat(backend, STRIPPING, reasoning=("[THINK]", "[/THINK]"))
    assert other_marks.render_suffix(TOOL, closed=True) is not None


def test_a_template_that_refuses_the_made_up_conversation_has_no_suffix(
    backend: Tokenizer,
) -> None:
    # Mistral's family: a tool's message must answer a call.
    strict = CHATML.replace(
        "{%- for message in messages %}",
        "{%- for message in messages %}{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
        "{{- raise_exception('no such call') }}{%- endif %}",
        1,
    )
    tokenizer = chat(backend, strict)
    assert tokenizer.render_suffix(TOOL, closed=True) is None
    assert tokenizer.render_suffix(USER, closed=True) is not None
    with pytest.raises(TemplateError, match="no such call"):
        tokenizer.render([*USER, *TOOL])


def test_the_default_system_prompt_of_a_template_is_not_in_the_suffix(backend: Tokenizer) -> None:
    tokenizer = chat(backend, "<|im_start|>system\nthe answer is four<|im_end|>\n" + CHATML)
    assert tokenizer.render_suffix(TOOL, closed=True) == chat(backend, CHATML).render_suffix(
        TOOL, closed=True
    )


def word_tokenizer(words: list[str]) -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<|im_start|>", "<|im_end|>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def test_a_vocabulary_of_a_few_words_is_enough() -> None:
    words = word_tokenizer(["user", "assistant", "tool", "four"])
    tokenizer = ChatTokenizer(
        fast(
            tokenizer_object=words, unk_token="<unk>", eos_token="<|im_end|>", chat_template=CHATML
        )
    )
    start, end, assistant, tool, four = (
        id_of(words, w) for w in ("<|im_start|>", "<|im_end|>", "assistant", "tool", "four")
    )
    assert tokenizer.render_suffix(TOOL, closed=True) == [start, tool, four, end, start, assistant]
    assert tokenizer.render_suffix(TOOL, closed=False) == [
        end, start, tool, four, end, start, assistant,
    ]  # fmt: skip


def test_a_vocabulary_without_two_words_has_no_suffix() -> None:
    tokenizer = ChatTokenizer(
        fast(tokenizer_object=word_tokenizer(["user"]), unk_token="<unk>", chat_template=CHATML)
    )
    assert tokenizer.render_suffix(TOOL, closed=True) is None


def test_a_last_token_that_reaches_into_the_end_of_the_turn_is_noticed() -> None:
    # "a." is one token, so an answer that ends with "a" has no end of its own.
    merging = Tokenizer(
        models.BPE({"a": 0, "b": 1, ".": 2, "a.": 3, "b.": 4}, [("a", "."), ("b", ".")])
    )
    tokenizer = ChatTokenizer(
        fast(
            tokenizer_object=merging,
            chat_template="{%- for m in messages %}{{- m.content + '.' }}{%- endfor %}",
        ),
        reasoning=None,
    )
    assert tokenizer.render_suffix([{"role": "tool", "content": "b"}], closed=False) is None


def test_the_module_does_not_import_transformers() -> None:
    code = "import sys, rollnest_adapters.tokenizer; assert not {'transformers', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
