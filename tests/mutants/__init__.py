"""Engines that are broken on purpose: each mutant breaks one invariant by a few substitutions in one place.

Every substitution's text must stand in its module exactly once, so a mutant that the engine has outgrown is noticed.
"""

from __future__ import annotations

from attrs import frozen

__all__ = ["FOCUSED", "MUTANTS", "Mutant"]


@frozen
class Mutant:
    """One broken engine.

    Attributes:
        name: What is broken.
        invariant: Which invariant suffers.
        changes: Module, its text, and what stands there instead.
        backend: Where the state machine plays.
    """

    name: str
    invariant: str
    changes: tuple[tuple[str, str, str], ...]
    backend: str = "asyncio"


def _mutant(
    invariant: str, name: str, *changes: tuple[str, str, str], backend: str = "asyncio"
) -> Mutant:
    return Mutant(name, invariant, changes, backend)


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "I1",
        "context has one logprob too few",
        ("_response.py", "bytes(4 * len(new_ids))", "bytes(4 * len(new_ids) - 4)"),
    ),
    _mutant(
        "I1",
        "a run of versions is one token short",
        (
            "_response.py",
            "self._extend_run(stop - start, version)",
            "self._extend_run(stop - start - (stop - start > 1), version)",
        ),
    ),
    _mutant(
        "I2",
        "mask includes context",
        (
            "_records.py",
            "        if not self.trained_from:\n            return origin\n",
            "        if not self.trained_from:\n            return memoryview(bytes([1]) * len(origin))\n",
        ),
    ),
    _mutant(
        "I2",
        "context counts as the policy's",
        (
            "_response.py",
            "(_CONTEXT if version == CONTEXT_VERSION else _POLICY) * (stop - start)",
            "_POLICY * (stop - start)",
        ),
    ),
    _mutant(
        "I3",
        "logprobs are not checked",
        (
            "_response.py",
            "if new_logprobs.tobytes()[_TOP].translate(None, _PLAIN_LOGPROB):",
            "if False:",
        ),
    ),
    _mutant(
        "I3",
        "version stamped at the end of the turn instead of the attempt",
        (
            "_context.py",
            "        if resumed:\n            services.counters.resumed_turns += 1\n",
            "        if resumed:\n            services.counters.resumed_turns += 1\n"
            "            whole, fresh = self._response[:], Response()\n"
            "            fresh.extend(whole[:start])\n"
            "            part = whole[start:]\n"
            "            fresh.append_policy(part.ids, part.logprobs, services.gate.version)\n"
            "            self._response = fresh\n",
        ),
    ),
    _mutant(
        "I3",
        "an answer of other weights is taken",
        (
            "_attempt.py",
            "if known is not None and newest > known:",
            "if False:",
        ),
    ),
    _mutant(
        "I4",
        "a resumed turn is sent without its partial",
        (
            "_context.py",
            "whole.extend(self._response.packed_ids)",
            "whole.extend(self._response.packed_ids[:start])",
        ),
    ),
    _mutant(
        "I4",
        "tokens of a failed request are kept",
        ("_context.py", "if not usable or self._core.frozen:", "if self._core.frozen:"),
    ),
    _mutant(
        "I4",
        "outcome taken from cancelled_caught",
        (
            "_context.py",
            "            if running.finish_reason is None and not scope.cancel_called:\n",
            "            if scope.cancelled_caught:\n"
            "                running.finish_reason = None\n"
            "            elif running.finish_reason is None:\n",
        ),
    ),
    _mutant(
        "I5",
        "cap not reduced on resume",
        (
            "_context.py",
            "self._run_attempt(sampling, start, cap - (stop - start), limit)",
            "self._run_attempt(sampling, start, cap, limit)",
        ),
    ),
    _mutant(
        "I5",
        "a turn beside another does not count",
        (
            "_context.py",
            "return max(len(self._response), self._reserved)",
            "return len(self._response)",
        ),
    ),
    _mutant(
        "I7",
        "partial dropped on abort",
        (
            "_context.py",
            "if not usable or self._core.frozen:",
            "if not usable or self._core.frozen or attempt.finish_reason == FinishReason.ABORT:",
        ),
    ),
    _mutant(
        "I7",
        "a next_batch that is cancelled loses what it took",
        (
            "_engine.py",
            "                if batch is not None:\n"
            "                    return self._handed_over(parts, batch)\n"
            "                self._let_start(",
            "                if batch is not None:\n"
            "                    await checkpoint()\n"
            "                    return self._handed_over(parts, batch)\n"
            "                self._let_start(",
        ),
    ),
    _mutant(
        "I7",
        "hand-off through a data-carrying stream",
        (
            "_engine.py",
            "                if batch is not None:\n"
            "                    return self._handed_over(parts, batch)\n"
            "                self._let_start(",
            "                if batch is not None:\n"
            "                    from anyio import create_memory_object_stream\n"
            "                    send, receive = create_memory_object_stream[Batch](1)\n"
            "                    with send, receive:\n"
            "                        send.send_nowait(batch)\n"
            "                        batch = await receive.receive()\n"
            "                    return self._handed_over(parts, batch)\n"
            "                self._let_start(",
        ),
    ),
    _mutant(
        "I7",
        "a row that was cut is forgotten",
        (
            "_table.py",
            "                self._buffer.wait_cut(row)\n                return",
            "                return",
        ),
    ),
    _mutant(
        "I7",
        "admission by totals instead of live groups",
        (
            "_producer.py",
            "                flight=flight,\n",
            "                flight=table.drawn - table.delivered - ready,\n",
        ),
    ),
    _mutant(
        "I7",
        "a settled group wakes nobody",
        (
            "_engine.py",
            "        self._ready.ring()\n        if self._fewer is None:\n",
            "        if self._fewer is None:\n",
        ),
    ),
    _mutant(
        "I7",
        "a producer does not hear of a group that has ended while a batch is waited for",
        (
            "_engine.py",
            "            parts.admission.changed(fewer.pop())\n",
            "            fewer.pop()\n",
        ),
    ),
    _mutant(
        "I8",
        "delivery twice",
        (
            "_buffer.py",
            "            taken = self._take(version, count - len(rows))\n",
            "            taken = self._by_version[version].rows[: count - len(rows)]\n",
        ),
    ),
    _mutant(
        "I8",
        "a delivered row is ready again after the next pause",
        (
            "_table.py",
            "        self.delivered += len(rows)\n        return rows",
            "        for row in rows[1:]:\n"
            "            self.delivered -= 1\n"
            "            self.delivered_tokens -= _tokens(row)\n"
            "            self._buffer.put(row, row.members.oldest_version or 0, row.visit)\n"
            "        self.delivered += len(rows)\n        return rows",
        ),
    ),
    _mutant(
        "I7",
        "rows that were held back for a tail batch are forgotten",
        ("_buffer.py", "        self._expired.extend(released)\n", ""),
    ),
    _mutant(
        "I7",
        "nobody says that a publication made groups too old",
        (
            "_delivery.py",
            "                self._on_expired(name, count)\n",
            "                pass\n",
        ),
        (
            "_engine.py",
            "            producer.runner.cancel_lost(parts.gate.version)\n"
            "            producer.wake()\n",
            "            producer.runner.cancel_lost(parts.gate.version)\n",
        ),
    ),
    _mutant(
        "I9",
        "expiry off by one",
        (
            "_table.py",
            "        oldest = version - self._max_staleness\n",
            "        oldest = version - self._max_staleness - 1\n",
        ),
    ),
    _mutant(
        "I9",
        "a group's age is its youngest member's",
        (
            "_table.py",
            "self._buffer.put(row, group.oldest_version or 0, row.visit)",
            "self._buffer.put(row, max(s.oldest_version or 0 for s in group.samples), row.visit)",
        ),
    ),
    _mutant(
        "I10",
        "no second look at the gate after waiting for a slot",
        (
            "_gate.py",
            "            if not self.shut:\n                return\n",
            "            if True:\n                return\n",
        ),
    ),
    _mutant(
        "I10",
        "no second look at the gate after waking",
        ("_gate.py", "while self.shut:\n", "if self.shut:\n"),
        (
            "_gate.py",
            "            if not self.shut:\n                return\n",
            "            if True:\n                return\n",
        ),
    ),
    _mutant(
        "I10",
        "commit accepted after close",
        (
            "_attempt.py",
            "            if self._closed:\n                self._counters.late",
            "            if False:\n                self._counters.late",
        ),
    ),
    _mutant(
        "I10",
        "the block begins before the controller has confirmed",
        (
            "_pause.py",
            "                await self._controller.pause(PauseMode.KEEP if keep else PauseMode.ABORT)\n",
            "                pass\n",
        ),
    ),
    _mutant(
        "I10",
        "what does not end is not cut after the grace",
        ("_pause.py", "            gate.cut()\n", "            pass\n"),
    ),
    _mutant(
        "I10",
        "resume skipped on error",
        (
            "_pause.py",
            "        await self._leave(exc)\n\n",
            "        if exc is None:\n            await self._leave(exc)\n"
            "        else:\n            self._release()\n\n",
        ),
    ),
    _mutant(
        "I10",
        "resume skipped when the pause is cancelled on its way in",
        (
            "_pause.py",
            "            await self._leave(error)\n            if isinstance(error, PauseFailed):\n",
            "            self._release()\n            if isinstance(error, PauseFailed):\n",
        ),
    ),
    _mutant(
        "I11",
        "verdict kept on an aborted sample",
        (
            "_members.py",
            "        sample = self.as_it_was(freeze_rollout(rollout, Status.ABORTED))\n",
            "        from ._records import Verdict\n"
            "        aborted = freeze_rollout(rollout, Status.ABORTED)\n"
            "        sample = evolve(aborted, verdict=Verdict(0.0))\n",
        ),
        (
            "_records.py",
            "if self.verdict is not None and self.status in _NEVER_JUDGED:",
            "if False:",
        ),
    ),
    _mutant(
        "I11",
        "a judger that fails means reward 0",
        (
            "_judging.py",
            'return evolve(sample, status=Status.FAILED, verdict=None, failure=Failure.of("judge", error))',
            "return evolve(sample, verdict=Verdict(0.0))",
        ),
    ),
    _mutant(
        "I11",
        "a reply without a token is an answer",
        (
            "_context.py",
            "        if stop == start and self._tries:\n",
            "        if False:\n",
        ),
    ),
    _mutant(
        "capacity",
        "turns take no slot",
        (
            "_gate.py",
            "            if not slots.take():\n"
            "                await (slots.acquire_first() if goes_on else slots.acquire())\n",
            "            if not slots.take():\n                slots.used += 1\n",
        ),
    ),
    _mutant(
        "tree",
        "a judger that has answered still holds a slot in the tree",
        (
            "_slots.py",
            "        del self.slots.calls[self]\n        self.slots.release()\n",
            "        self.slots.release()\n",
        ),
    ),
    _mutant(
        "tree",
        "a sample that was judged is shown as one that still is",
        (
            "_members.py",
            "            return _ended(sample)\n",
            "            return evolve(_ended(sample), status='live')\n",
        ),
    ),
    _mutant(
        "I8",
        "a checkpoint forgets the batches that are not committed",
        (
            "_saving.py",
            "uncommitted=list(delivery.uncommitted.values()),",
            "uncommitted=[],",
        ),
    ),
    _mutant(
        "I4",
        "a checkpoint forgets journals",
        (
            "_snapshot.py",
            "journals=[self._journal(index, j) for index, j in visit.journals.items()],",
            "journals=[],",
        ),
    ),
    _mutant(
        "I4",
        "a checkpoint forgets turns that have not ended",
        (
            "_capture.py",
            "if running is not None and running.stop > running.start:",
            "if running is not None and running.stop < 0:",
        ),
    ),
    _mutant(
        "I7",
        "counters begin anew with a restored engine",
        (
            "_table.py",
            "            setattr(self, name, counters[name])\n",
            "            pass\n",
        ),
    ),
    _mutant(
        "I8",
        "what a restored engine had handed over is handed over again, trained or not",
        (
            "_restore.py",
            "for batch in batches if batch.index > trained_through]",
            "for batch in batches]",
        ),
    ),
    _mutant(
        "I7",
        "groups that were in flight are not in a checkpoint",
        (
            "_snapshot.py",
            "            for note in task.flight:\n",
            "            for note in ():\n",
        ),
    ),
)

FOCUSED: tuple[tuple[str, Mutant], ...] = (
    (
        "test_producing.py",
        _mutant(
            "I7",
            "a batch that is complete wakes nobody before the stall report",
            (
                "_engine.py",
                "        self._ready.ring()\n        if self._fewer is None:\n",
                "        if self._fewer is None:\n",
            ),
        ),
    ),
    (
        "test_torch_adapter.py",
        _mutant(
            "I6",
            "a label wherever there is a token",
            (
                "rollnest_adapters/torch.py",
                "labels=np.where(trained, _ahead(input_ids), IGNORED),",
                "labels=_ahead(input_ids),",
            ),
        ),
    ),
    (
        "test_torch_adapter.py",
        _mutant(
            "I6",
            "labels by what the policy made, not by the mask",
            (
                "rollnest_adapters/torch.py",
                'trained = _ahead(_after_prompts(segments, prompts, "mask", 0)).astype(np.bool_)',
                'trained = _ahead(_after_prompts(segments, prompts, "ids", 0)).astype(np.bool_)',
            ),
        ),
    ),
    (
        "test_evaluation.py",
        _mutant(
            "I7",
            "an evaluation's groups stand in a training table",
            (
                "_evaluation.py",
                "self._table = table = GroupTable(\n"
                "            spec.name,\n"
                "            max_staleness=0,\n"
                "            retries=0,\n"
                "            restart_whole=overrides_generate_group(spec.loop),\n"
                "            replays_groups=replays_groups(spec.loop),\n"
                "        )\n",
                "self._table = table = training\n",
            ),
            (
                "_evaluation.py",
                "        break_engine: Callable[[str, BaseException], None],\n    ) -> None:\n",
                "        break_engine: Callable[[str, BaseException], None],\n"
                "        training: GroupTable,\n    ) -> None:\n",
            ),
            (
                "_engine.py",
                "            break_engine=self._break,\n        )\n        async with AsyncExitStack",
                "            break_engine=self._break,\n"
                "            training=next(iter(parts.producers.values())).table,\n"
                "        )\n        async with AsyncExitStack",
            ),
        ),
    ),
    (
        "test_evaluation.py",
        _mutant(
            "I7",
            "an evaluation's tokens are a task's",
            (
                "_evaluation.py",
                "self.counters = TokenCounters()",
                "self.counters = services.counters",
            ),
        ),
    ),
    (
        "test_evaluation.py",
        _mutant(
            "evaluation",
            "new weights cancel an evaluation after the gate has opened",
            (
                "_pause.py",
                "            self._updated(self._gate.version)\n            self._gate.open()\n",
                "            self._gate.open()\n            self._updated(self._gate.version)\n",
            ),
        ),
    ),
    (
        "test_evaluation.py",
        _mutant(
            "evaluation",
            "one begins although a pause waits to begin",
            (
                "_evaluation.py",
                "                while self._held:\n",
                "                while self._gate.closed:\n",
            ),
        ),
    ),
    (
        "test_outage.py",
        _mutant(
            "outage",
            "a success counts late: requests that were sent before it failed prove that it works",
            (
                "_outage.py",
                "        self._prove(mark)\n        if self._gate.barred:\n",
                "        self._prove(self.failures)\n        if self._gate.barred:\n",
            ),
        ),
    ),
    (
        "test_outage.py",
        _mutant(
            "outage",
            "what failed in an outage counts against its turn",
            ("_outage.py", "            self._tries = 0  # those were the server's\n", ""),
        ),
    ),
    (
        "test_outage.py",
        _mutant(
            "outage",
            "probes in a pause",
            (
                "_gate.py",
                "        await self.wait_unpaused()\n        has_slot",
                "        has_slot",
            ),
            ("_prober.py", "        await gate.wait_unpaused()\n", ""),
        ),
    ),
    (
        "test_outage.py",
        _mutant(
            "outage",
            "limits run on",
            (
                "_gate.py",
                "        self.barred = True\n        self._shut()\n",
                "        self.barred = self.shut = True\n",
            ),
        ),
    ),
    (
        "test_processes.py",
        _mutant(
            "processes",
            "what a judger has started outlives it",
            (
                "_processes.py",
                "                os.killpg(self._process.pid, signal.SIGKILL)\n",
                "                self._process.kill()\n",
            ),
        ),
    ),
    (
        "test_processes.py",
        _mutant(
            "processes",
            "whoever waits for a process holds a judge slot",
            (
                "_processes.py",
                "        async with Call(pool.slots, call.what, call.of, call.by):\n"
                "            await call.begin(patience)\n",
                "        await call.begin(patience)\n"
                "        async with Call(pool.slots, call.what, call.of, call.by):\n",
            ),
        ),
    ),
    (
        "test_stall.py",
        _mutant(
            "stall",
            "time with the gate closed counts",
            (
                "_gate.py",
                "        self.last_end = now - max(0.0, self.closed_since - self.last_end)\n",
                "",
            ),
        ),
    ),
    (
        "test_capacity_groups.py",
        _mutant(
            "capacity",
            "what runs ahead comes before what a batch lacks",
            (
                "_admission.py",
                "(not self._applicants[n].lacking, self._behind(n))",
                "self._behind(n)",
            ),
        ),
    ),
    (
        "test_capacity_groups.py",
        _mutant(
            "capacity",
            "a place that is free wakes one task only",
            (
                "_admission.py",
                "            for applicant in self._applicants.values():\n",
                "            for applicant in [self._applicants[name]]:\n",
            ),
        ),
    ),
    (
        "test_pause_evict.py",
        _mutant(
            "I7",
            "eviction gives up members that have ended",
            (
                "_table.py",
                "            elif completed and not self._restart_whole:\n",
                "            elif False:\n",
            ),
        ),
    ),
    (
        "test_pause_evict.py",
        _mutant(
            "I7",
            "eviction cancels a group whose judgers are at it",
            (
                "_members.py",
                "        if at_once or not self._being_judged:\n",
                "        if True:\n",
            ),
        ),
    ),
    (
        "test_pause_evict.py",
        _mutant(
            "I7",
            "a sample that was not judged in time is made again",
            (
                "_table.py",
                "            elif sample.unjudged and not self._restart_whole:\n",
                "            elif False:\n",
            ),
        ),
    ),
    (
        "test_pause_keep.py",
        _mutant(
            "I3",
            "a frozen turn's late tokens get the version that it began with",
            (
                "_attempt.py",
                "                if self._newest_version is not None and self._newest_version() != versions:\n",
                "                if False:\n",
            ),
        ),
    ),
    (
        "test_pause_keep.py",
        _mutant(
            "I10",
            "kept turns are aborted",
            (
                "_pause.py",
                "            if self._mode is not PauseMode.KEEP:\n",
                "            if True:\n",
            ),
        ),
    ),
    (
        "test_partials.py",
        _mutant(
            "I6",
            "tokens that are too old are trained",
            (
                "_records.py",
                "        first = self._first_trained\n",
                "        first = 0\n",
            ),
        ),
    ),
    (
        "test_partials.py",
        _mutant(
            "I9",
            "a discarded partial is kept",
            (
                "_context.py",
                "            if not services.partial and self._is_partial(running, sampling):\n",
                "            if False:\n",
            ),
        ),
    ),
    (
        "test_pause_and_leave.py",
        _mutant(
            "I10",
            "a controller is called that was closed",
            (
                "_control.py",
                "            self.check()\n            with CancelScope()",
                "            with CancelScope()",
            ),
        ),
    ),
    (
        "test_start_paused.py",
        _mutant(
            "I9",
            "the gate opens without weights",
            ("_gate.py", "        if self.awaits_weights:\n            return\n", ""),
        ),
    ),
    (
        "test_pause_release.py",
        _mutant(
            "I10",
            "the controller resumes before its memory is back",
            ("_pause.py", "        for step in reversed(steps):\n", "        for step in steps:\n"),
        ),
    ),
    (
        "test_redundancy.py",
        _mutant(
            "members",
            "spare members run to their end",
            (
                "_members.py",
                "self._tasks is not None and self._completed >= self._spec.group_size:",
                "self._tasks is not None and self._completed > 10**9:",
            ),
        ),
    ),
    (
        "test_redundancy.py",
        _mutant(
            "members",
            "a group has all that completed",
            (
                "_capture.py",
                "if i not in completed[:group_size]}",
                "if i not in completed}",
            ),
        ),
    ),
    (
        "test_failure_policy.py",
        _mutant(
            "members",
            "one retry too many",
            (
                "_members.py",
                "failures >= policy.retries",
                "self._failures[whose, failure.kind] > policy.retries",
            ),
        ),
    ),
    (
        "test_failure_policy.py",
        _mutant(
            "members",
            "a dead member cancels its siblings",
            (
                "_members.py",
                "self._tasks is not None and self._completed >= self._spec.group_size:",
                "self._tasks is not None and (self._failed or self._completed >= self._spec.group_size):",
            ),
        ),
    ),
    (
        "test_refine.py",
        _mutant(
            "members",
            "who was refined away is nowhere",
            (
                "_group.py",
                "            self._table.let_go(sample, REFINED)\n",
                "            pass\n",
            ),
        ),
    ),
    (
        "test_group_loops.py",
        _mutant(
            "members",
            "a run that was cancelled is trained",
            (
                "_group_loop.py",
                "        elif sample is None and index in self._begun:\n",
                "        elif sample is None and index < 0:\n",
            ),
        ),
    ),
    (
        "test_hosting_groups.py",
        _mutant(
            "members",
            "a run that a group loop cancelled on a host counts as one that came to its end",
            (
                "_group_session.py",
                "            if member.has_ended:\n",
                "            if True:\n",
            ),
        ),
    ),
    (
        "test_limits.py",
        _mutant(
            "members",
            "a turn that timed out has lost its tokens",
            (
                "_context.py",
                "            usable = timed_out = services.limits",
                "            usable = timed_out = False and services.limits",
            ),
        ),
    ),
    (
        "test_checkpoint_files.py",
        _mutant(
            "checkpoints",
            "a checkpoint has its name before it is complete",
            (
                "_checkpoint.py",
                'part = directory / f"{_WRITING}{uuid4().hex}"',
                "part = folder",
            ),
            ("_checkpoint.py", "        part.rename(folder)\n", "        pass\n"),
        ),
    ),
    (
        "test_checkpoint_files.py",
        _mutant(
            "checkpoints",
            "checksums are not looked at",
            ("_checkpoint.py", "if _Sum().add(data).entry != expected:", "if False:"),
        ),
    ),
    (
        "test_checkpoint_files.py",
        _mutant(
            "checkpoints",
            "the manifest's own checksum is not looked at",
            ("_checkpoint.py", "if signature != _signature(manifest):", "if False:"),
        ),
    ),
    (
        "test_checkpoint_files.py",
        _mutant(
            "checkpoints",
            "files are not brought to the disk",
            ("_checkpoint.py", "        os.fsync(file.fileno())\n", "        pass\n"),
        ),
    ),
    (
        "test_checkpoints.py",
        _mutant(
            "I9",
            "what newer weights have made is kept by a trainer that went back",
            (
                "_table.py",
                "is_newer = newest is not None and newest > version",
                "is_newer = False",
            ),
        ),
    ),
    (
        "test_checkpoints.py",
        _mutant(
            "I9",
            "a restored engine samples before its weights are known to be right",
            (
                "_engine.py",
                "        self._start_paused = True\n        self._first_from_trainer = restoration",
                "        self._start_paused = False\n        self._first_from_trainer = restoration",
            ),
        ),
    ),
    (
        "test_checkpoints.py",
        _mutant(
            "I8",
            "prompts begin anew with a restored engine",
            (
                "_sampler.py",
                "        self._epoch, self._drawn = epoch, drawn\n",
                "        self._epoch, self._drawn = 0, 0\n",
            ),
        ),
    ),
    (
        "test_replayable_groups.py",
        _mutant(
            "members",
            "a member that a group loop resampled is not given again",
            (
                "_lives.py",
                "        lives = [*members, *self.left.values()]\n        known",
                "        lives = [*members]\n        known",
            ),
        ),
    ),
    (
        "test_replayable_groups.py",
        _mutant(
            "I11",
            "a verdict holds for a member that came out otherwise",
            (
                "_lives.py",
                "return before if _holds_the_same(sample, before) else sample",
                "return before",
            ),
        ),
    ),
)
"""Mutants of what the state machine does not play, with the tests that catch each."""
