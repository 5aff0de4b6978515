"""What an engine and the place that runs its agent loops tell each other. Frozen records that can be pickled.

Each side sends in order, and takes what comes in order. One session is one run of one loop on one rollout.

    engine                                      host
      Prepare, once for each task        ->
      Begin                              ->       runs the loop
                                         <-       Ask: what the loop did since, and what it wants
      Run, if that is a tool to be called ->
                                         <-       Ran
      Answer                             ->       the loop goes on
                                         <-       Ended
      Stop: the tool is over its limit   ->
                                         <-       Withdraw: the loop has cancelled what it asked for; gets an Answer
      End: the rollout is cut            ->       the loop is cancelled; Ended all the same

A group loop has a session, and each of its members has one, with a rollout. What the loop asks a member for is asked in
the member's; the rest in the group's:

      BeginGroup, with its members       ->       runs the group loop
                                         <-       Ask: a member is to be run, or all are to be judged
      Enter: another rollout is tried    ->
      RunLoop: the member's loop runs    ->       in the task that asked, as a tool does
                                         <-       Ended, of the member
      GroupAnswer: how members have ended ->      the group loop goes on
                                         <-       Did, Resampled, Dropped: what the group loop decides at once
                                         <-       Withdraw: the run was cancelled there, and has ended
                                         <-       Ended, of the group
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from attrs import frozen

from ._codecs import Plain
from ._journal import OnUnknown, ToolReplay
from ._options import Sampling
from ._records import Failure, Prompt, Sample, Verdict
from ._response import Response
from .abc import Capabilities, Tokenizer
from .errors import HostLost, RollnestError

__all__ = [
    "Answer",
    "Appended",
    "Ask",
    "Begin",
    "BeginGroup",
    "Did",
    "Dropped",
    "Edit",
    "End",
    "Ended",
    "Enter",
    "Failed",
    "Finished",
    "FromHost",
    "Generate",
    "GroupAnswer",
    "Grown",
    "Judge",
    "JudgeGroup",
    "Member",
    "Opened",
    "Prepare",
    "Ran",
    "Request",
    "Resampled",
    "Run",
    "RunLoop",
    "RunMember",
    "Scored",
    "Stop",
    "ToHost",
    "UseTool",
    "Withdraw",
    "holds_users_objects",
]


# What a loop did since it last asked


@frozen(eq=False)
class Opened:
    """It opened another context."""

    prompt_ids: array[int]


@frozen(eq=False)
class Appended:
    """It appended to a context; not cut to what has room."""

    context: int
    ids: array[int]


@frozen
class Scored:
    """It set the verdict."""

    verdict: Verdict


@frozen
class Finished:
    """It ended the sample as completed."""

    reason: str


@frozen
class Failed:
    """It ended the sample as failed."""

    reason: str


Edit: TypeAlias = "Opened | Appended | Scored | Finished | Failed"


# What a loop asks for


@frozen
class Generate:
    """A turn in a context."""

    context: int
    sampling: Sampling | None
    max_tokens: int | None


@frozen
class UseTool:
    """A call of a tool: to be recorded, and called by the host if it isn't."""

    name: str
    asked: tuple[str, str]
    replay: ToolReplay
    on_unknown: OnUnknown


@frozen
class Judge:
    """The verdict of the task's judger."""


@frozen
class RunMember:
    """Of a group loop: the run of a member, and its judging.

    Attributes:
        member: The member's session.
    """

    member: int


@frozen
class JudgeGroup:
    """Of a group loop: the end of all members, and their verdicts."""


Request: TypeAlias = "Generate | UseTool | Judge | RunMember | JudgeGroup"


# From the host


@frozen(eq=False)
class Ask:
    """Asks for something; what one strand asks for comes one after the other.

    Attributes:
        session: Whose loop.
        number: Which of its requests.
        strand: Which of the loop's tasks; 0 is the one that runs it.
        edits: What the loop did before.
        request: What it asks for.
    """

    session: int
    number: int
    strand: int
    edits: Sequence[Edit]
    request: Request


@frozen(eq=False)
class Ran:
    """A tool that was to be called has ended.

    Attributes:
        session: Whose loop.
        number: The request.
        value: What it returned, as a journal holds it.
        error: Why it did not.
    """

    session: int
    number: int
    value: Plain = None
    error: RollnestError | None = None


@frozen(eq=False)
class Withdraw:
    """Nobody waits for a request any more."""

    session: int
    number: int


@frozen(eq=False)
class Ended:
    """The loop has ended: it returned, or failed, or was cancelled because the engine asked for it.

    Attributes:
        session: Whose loop.
        edits: What it did since it last asked.
        failure: Why it failed; `HostLost` if it said that itself, and is to be run again.
    """

    session: int
    edits: Sequence[Edit] = ()
    failure: Failure | HostLost | None = None


@frozen(eq=False)
class Did:
    """What a member's rollout was given before something else in its group.

    Attributes:
        session: The member's.
        edits: What the loop did since it last asked.
    """

    session: int
    edits: Sequence[Edit]


@frozen(eq=False)
class Resampled:
    """A group loop has put a fresh member in the place of another.

    Attributes:
        session: The group's.
        member: The session of who left.
        fresh: The session of the fresh one, a negative number: hosts give these, so that they need not ask.
    """

    session: int
    member: int
    fresh: int


@frozen(eq=False)
class Dropped:
    """A group loop has let a member go.

    Attributes:
        session: The group's.
        index: The member's place. Another rollout may be tried there meanwhile.
        reason: Why.
    """

    session: int
    index: int
    reason: str


FromHost: TypeAlias = "Ask | Ran | Withdraw | Ended | Did | Resampled | Dropped"


# To the host


@frozen(eq=False)
class Prepare:
    """What all rollouts of one task have in common; sent before the first of them.

    Attributes:
        task: Its name.
        setup: A number for it.
        capabilities: The policy's.
        tokenizer: The engine's.
        sampling: The task's.
        max_response_tokens: The task's.
        max_context: The task's.
        stop_token_ids: Ids that end a turn.
    """

    task: str
    setup: int
    capabilities: Capabilities
    tokenizer: Tokenizer | None
    sampling: Sampling
    max_response_tokens: int | None
    max_context: int
    stop_token_ids: frozenset[int]


@frozen(eq=False)
class Begin:
    """Runs the loop on a rollout.

    Attributes:
        session: Its number.
        setup: What it has in common with others.
        prompt: What is asked.
        prompt_ids: Its tokens.
        visit: Part of the rollout's name.
        index: Part of it.
        place: Part of it.
        seed: Of its random generator.
        judges_groups: Whether its verdict depends on its siblings.
    """

    session: int
    setup: int
    prompt: Prompt
    prompt_ids: array[int]
    visit: int
    index: int
    place: int
    seed: int
    judges_groups: bool


@frozen(eq=False)
class Grown:
    """What a context has more than before.

    Attributes:
        start: Where it begins.
        columns: The tokens.
        finish_reason: Of the turn that they are; `None` if there is none.
        text: The turn's.
        attempts: The turn's.
    """

    start: int
    columns: Response
    finish_reason: Literal["stop", "length", "timeout", "abort"] | None
    text: str | None
    attempts: int


@frozen(eq=False)
class Run:
    """The tool is to be called now.

    Attributes:
        session: Whose loop.
        number: The request.
        key: What `tool_key()` returns in it.
    """

    session: int
    number: int
    key: str


@frozen(eq=False)
class Answer:
    """What a request has brought.

    Attributes:
        session: Whose loop.
        number: The request.
        error: What it raises.
        recorded: Whether the tool was not called, because `value` is what it returned before.
        value: That; or a verdict.
        context: Which context has grown.
        grown: By what.
        cut: Whether the budget has ended the sample.
        failure: Why the engine has ended it.
    """

    session: int
    number: int
    error: RollnestError | None = None
    recorded: bool = False
    value: Plain | Verdict = None
    context: int = 0
    grown: Grown | None = None
    cut: bool = False
    failure: Failure | None = None


@frozen(eq=False)
class Stop:
    """The tool is to end: it took too long."""

    session: int
    number: int


@frozen(eq=False)
class End:
    """The loop is to end: its rollout was cut."""

    session: int


@frozen(eq=False)
class Member:
    """A member of a group.

    Attributes:
        session: Its number.
        index: Part of its rollout's name.
        place: Part of it.
        seed: Of its random generator.
    """

    session: int
    index: int
    place: int
    seed: int


@frozen(eq=False)
class BeginGroup:
    """Runs a group loop.

    Attributes:
        session: Its number.
        setup: What its rollouts have in common with others.
        prompt: What is asked.
        prompt_ids: Its tokens.
        visit: Part of its name.
        members: Its members.
        seed: Of the random generators of those that take another's place.
        seeds: Of those of them, by index and place, that have one of their own.
        judges: Whether the task has a judger.
        judges_groups: Whether that judges whole groups.
    """

    session: int
    setup: int
    prompt: Prompt
    prompt_ids: array[int]
    visit: int
    members: Sequence[Member]
    seed: int
    seeds: Mapping[tuple[int, int], int]
    judges: bool
    judges_groups: bool


@frozen(eq=False)
class Enter:
    """Another rollout is tried in a member's place.

    Attributes:
        session: The group's.
        member: It.
    """

    session: int
    member: Member


@frozen(eq=False)
class RunLoop:
    """The loop of a member is to run now.

    Attributes:
        session: The group's.
        number: The request.
        member: The member's session.
    """

    session: int
    number: int
    member: int


@frozen(eq=False)
class GroupAnswer:
    """What a request of a group loop has brought.

    Attributes:
        session: The group's.
        number: The request.
        error: What it raises.
        sample: How the member ended that was to be run; without its prompt.
        ended: What the host doesn't know yet of how members have ended: their sessions, and samples without prompts.
    """

    session: int
    number: int
    error: RollnestError | None = None
    sample: Sample | None = None
    ended: Sequence[tuple[int, Sample]] = ()


ToHost: TypeAlias = (
    "Prepare | Begin | Run | Answer | Stop | End | BeginGroup | Enter | RunLoop | GroupAnswer"
)


def holds_users_objects(message: ToHost) -> bool:
    """Whether a message may hold objects of classes that are the user's own: a prompt, a tokenizer, a verdict."""
    if isinstance(message, Answer):
        return isinstance(message.value, Verdict)
    return isinstance(message, Prepare | Begin | BeginGroup | GroupAnswer)
