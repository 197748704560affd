"""The faults, and the tests that meet each module."""

from dataclasses import dataclass

MEETS = {
    "raypp/control/machine.py": (
        ["tests/unit/control/test_machine.py"],
        ["tests/ray/test_controller.py", "tests/ray/test_unled_ends.py", "tests/e2e/test_stop_and_resume.py"],
    ),
    "raypp/state/checkpoint/commit.py": (
        ["tests/unit/checkpoint/test_commit_protocol.py", "tests/unit/hostile/test_run_documents.py"],
        ["tests/s3/test_attempts_race.py", "tests/s3/test_conditional_writes.py", "tests/ranks/test_last_saves.py"],
    ),
    "raypp/stages/pipeline/agreement.py": (
        ["tests/unit/pipeline/test_agreement.py"],
        [
            "tests/ranks/test_plan_mismatch.py",
            "tests/ranks/test_mesh_does_not_change_numbers.py",
            "tests/ranks/test_saves_in_training.py",
            "tests/ranks/test_memory_tier.py",
        ],
    ),
    "raypp/stages/pipeline/runtime.py": (
        ["tests/unit/pipeline/test_runtime.py"],
        [
            "tests/ranks/test_mesh_does_not_change_numbers.py",
            "tests/ranks/test_evaluation.py",
            "tests/ranks/test_replica_sums.py",
            "tests/ranks/test_long_steps.py",
            "tests/ranks/test_lookahead_and_wire.py",
            "tests/ranks/test_waiting_sends.py",
            "tests/ranks/test_measured_costs.py",
            "tests/ranks/test_activation_offload.py",
        ],
    ),
    "raypp/planning/schedules/posting.py": (
        ["tests/unit/schedules/test_communication.py"],
        ["tests/ranks/test_waiting_for_all_posted.py", "tests/ranks/test_waiting_sends.py"],
    ),
    "raypp/planning/schedules/waiting.py": (
        ["tests/unit/schedules/test_waiting.py"],
        ["tests/ranks/test_waiting_sends.py"],
    ),
    "raypp/control/recovery/": (
        ["tests/unit/recovery"],
        ["tests/processes/test_failure_recipes.py", "tests/ray/test_causes_of_failures.py"],
    ),
    "raypp/control/process_evidence.py": (
        ["tests/unit/recovery/test_cause_of_death.py", "tests/unit/control/test_process_evidence.py"],
        ["tests/processes/test_traces_of_processes.py", "tests/ray/test_causes_of_failures.py"],
    ),
    "raypp/planning/geometry.py": (["tests/unit/mesh/test_shapes.py"], ["tests/ranks/test_recut_of_runs.py"]),
    "raypp/stages/parallel/apply.py": (
        ["tests/unit/parallel/test_prepared_stages.py"],
        [
            "tests/ranks/test_mesh_does_not_change_numbers.py",
            "tests/ranks/test_low_memory.py",
            "tests/ranks/test_recompute_and_compile.py",
            "tests/ranks/test_quantised_base.py",
            "tests/ranks/test_experts.py",
        ],
    ),
    "raypp/stages/parallel/tensor.py": (
        [],
        ["tests/ranks/test_tensor_parallel.py", "tests/ranks/test_recut_of_runs.py"],
    ),
    "raypp/stages/models/tensor_ranks.py": ([], ["tests/ranks/test_sampling.py"]),
    "raypp/stages/models/products.py": (["tests/unit/parallel/test_compiled_blocks.py"], []),
    "raypp/rank/data/loader.py": (
        ["tests/unit/data/test_loader.py", "tests/unit/data/test_mixture.py", "tests/unit/data/test_chat_source.py"],
        ["tests/ranks/test_evaluation.py", "tests/ranks/test_leaving_and_coming_back.py"],
    ),
}
"""By the beginning of a file's name: its unit tests, then its others, the most likely first. Unit
tests that import the module follow the unit tests."""


@dataclass(frozen=True)
class Fault:
    """One wrong place.

    Attributes:
        name: What is wrong.
        file: The file.
        old: The text that is replaced; it is there once.
        new: The wrong text.
        met: What a user would meet.
    """

    name: str
    file: str
    old: str
    new: str
    met: str


_MACHINE = "raypp/control/machine.py"
_COMMIT = "raypp/state/checkpoint/commit.py"
_AGREE = "raypp/stages/pipeline/agreement.py"
_RUNTIME = "raypp/stages/pipeline/runtime.py"
_POSTING = "raypp/planning/schedules/posting.py"
_WAITING = "raypp/planning/schedules/waiting.py"
_DEFAULT = "raypp/control/recovery/policies/default.py"
_POLICY = "raypp/control/recovery/policy.py"
_DEATH = "raypp/control/process_evidence.py"
_SHAPE = "raypp/planning/geometry.py"
_HANG = "raypp/control/recovery/hang_analysis.py"
_APPLY = "raypp/stages/parallel/apply.py"
_LOADER = "raypp/rank/data/loader.py"
_TENSOR = "raypp/stages/parallel/tensor.py"
_TENSOR_RANKS = "raypp/stages/models/tensor_ranks.py"
_PRODUCTS = "raypp/stages/models/products.py"

FAULTS = [
    # The state machine.
    Fault(
        "machine-acts-after-the-end", _MACHINE,
        "    if machine.phase is RunPhase.DONE:\n        return machine, ()\n",
        "",
        "a stop after the end changes the state of a run that succeeded",
    ),
    Fault(
        "machine-late-claim-counts", _MACHINE,
        "case Claimed() if machine.phase is RunPhase.LAUNCHING:",
        "case Claimed():",
        "an event that comes too late changes the number of the attempt that runs",
    ),
    Fault(
        "machine-commit-goes-back", _MACHINE,
        "max(machine.committed_step, event.step)",
        "event.step",
        "status shows an older checkpoint than there is",
    ),
    Fault(
        "machine-restarts-not-counted", _MACHINE,
        "phase=RunPhase.LAUNCHING, restarts=machine.restarts + 1), (Launch(),)",
        "phase=RunPhase.LAUNCHING), (Launch(),)",
        "status shows no restarts",
    ),
    Fault(
        "machine-counts-a-restart-again-with-its-controller", _MACHINE,
        "restarts = machine.restarts if counted else machine.restarts + 1",
        "restarts = machine.restarts + 1",
        "status shows a restart that never was",
    ),
    Fault(
        "machine-no-room-is-a-plain-failure", _MACHINE,
        "event.reason, exit_code=4)",
        "event.reason, exit_code=1)",
        "a script cannot tell a full cluster from a failed run",
    ),
    Fault(
        "machine-growth-outlives-a-stop", _MACHINE,
        "machine.reshaping and not machine.stop:",
        "machine.reshaping:",
        "a run that was told to stop while it grew starts again",
    ),
    Fault(
        "machine-grows-without-progress", _MACHINE,
        "committed > machine.grown_at",
        "committed >= machine.grown_at",
        "a run grows and shrinks without training",
    ),
    Fault(
        "machine-ends-an-attempt-twice", _MACHINE,
        "    if machine.phase is RunPhase.ENDING:\n        return machine, ()\n    return",
        "    return",
        "the second failure of an attempt ends processes that were to be kept",
    ),
    Fault(
        "machine-keeps-processes-of-another-mesh", _MACHINE,
        "return machine.finish is None and not machine.stop and not machine.reshaping",
        "return machine.finish is None and not machine.stop",
        "a process of the old mesh is seated in the new one",
    ),
    Fault(
        "machine-old-failures-stay", _MACHINE,
        "history=(*machine.history, end), failures=())",
        "history=(*machine.history, end))",
        "the second failure is explained by the first one's cause",
    ),
    Fault(
        "machine-failed-save-is-a-stop", _MACHINE,
        "if machine.stop and not machine.failures:",
        "if machine.stop:",
        "a stop whose last save failed exits with 0",
    ),
    Fault(
        "machine-stop-in-a-pause-hangs", _MACHINE,
        "if machine.phase in (RunPhase.IDLE, RunPhase.WAITING):",
        "if machine.phase is RunPhase.IDLE:",
        "a stop between two attempts waits for an attempt that does not exist",
    ),
    Fault(
        "machine-saved-nothing-new", _MACHINE,
        "event.step <= (machine.history[-1].committed_step or 0)",
        "event.step < (machine.history[-1].committed_step or 0)",
        "a stop says it saved although the state was lost",
    ),
    # COMMIT.
    Fault(
        "commit-of-a-stale-attempt", _COMMIT,
        "    _check_newest(store, commit)\n    key = ",
        "    key = ",
        "an attempt that was given up commits over its successor",
    ),
    Fault(
        "commit-fence-off-by-one", _COMMIT,
        "if newest > commit.attempt:",
        "if newest > commit.attempt + 1:",
        "the attempt before the current one can still commit",
    ),
    Fault(
        "commit-no-second-look-before-deleting", _COMMIT,
        "        _check_newest(store, commit)  # again: what is deleted here may be a newer attempt's by now\n",
        "",
        "a slow old attempt deletes the checkpoint of a newer one",
    ),
    Fault(
        "commit-replaces-its-equal", _COMMIT,
        "there.attempt >= commit.attempt",
        "there.attempt > commit.attempt",
        "two processes of one attempt commit different states of one step",
    ),
    Fault(
        "commit-lost-answer-is-a-failure", _COMMIT,
        "        if there is not None and there.nonce == commit.nonce:\n"
        "            return  # an earlier try succeeded, and its response was lost\n",
        "",
        "a save that succeeded is reported as failed after a lost response",
    ),
    Fault(
        "commit-attempt-claimed-twice", _COMMIT,
        "json.dumps(claim).encode(), if_absent=True)",
        "json.dumps(claim).encode(), if_absent=False)",
        "two controllers run the same attempt",
    ),
    Fault(
        "commit-overwrites", _COMMIT,
        "    try:\n        store.put(key, commit.to_bytes(), if_absent=True)",
        "    try:\n        store.put(key, commit.to_bytes(), if_absent=False)",
        "a commit replaces one of another attempt unseen",
    ),
    Fault(
        "commit-second-write-unconditional", _COMMIT,
        "        store.delete([key])\n        store.put(key, commit.to_bytes(), if_absent=True)",
        "        store.delete([key])\n        store.put(key, commit.to_bytes(), if_absent=False)",
        "a newer attempt's commit is overwritten between delete and write",
    ),
    Fault(
        "commit-unfinished-saves-are-listed", _COMMIT,
        "if step is not None and info.key == commit_key(run, step):",
        "if step is not None:",
        "`checkpoints list` shows a save that was interrupted",
    ),
    Fault(
        "commit-one-rank-twice", _COMMIT,
        "elif record.rank in ranks:",
        "elif False:",
        "a damaged COMMIT with two objects of one rank is read",
    ),
    Fault(
        "commit-other-format-is-read", _COMMIT,
        "if version != FORMAT:",
        "if False:",
        "a checkpoint of another format is read by the rules of this one",
    ),
    Fault(
        "commit-of-another-run", _COMMIT,
        "if (commit.run, commit.step) != (run, step):",
        "if commit.step != step:",
        "a copied folder resumes as the run it was copied from",
    ),
    # The agreement on a step.
    Fault(
        "agree-always-saves-before-a-stop", _AGREE,
        "asked.stop and asked.save_before_stop",
        "asked.save_before_stop",
        "`stop --no-save` saves, because ranks that were not asked say so",
    ),
    Fault(
        "agree-first-replica-unchecked", _AGREE,
        "for r in range(replicas) if",
        "for r in range(1, replicas) if",
        "nodes with different data train on without an error",
    ),
    Fault(
        "agree-tokens-of-one-replica", _AGREE,
        "global_tokens=sum(tokens)",
        "global_tokens=tokens[replica]",
        "gradients are divided by the wrong number",
    ),
    Fault(
        "agree-lengths-of-the-first-replica", _AGREE,
        "for length in table[replica, :count]",
        "for length in table[0, :count]",
        "receives have the wrong shape where lengths differ between replicas",
    ),
    Fault(
        "agree-arrived-too-early", _AGREE,
        "SnapshotState(every, -own, -arrived,",
        "SnapshotState(every, -own, -own,",
        "a snapshot counts as copied to another node before it is",
    ),
    Fault(
        "agree-own-save-only", _AGREE,
        "saving=SaveProgress(saving)",
        "saving=proposal.saving",
        "ranks disagree on whether a save is in progress, and hang",
    ),
    Fault(
        "agree-times-and-peaks-mixed", _AGREE,
        "compute_us=tuple(rest[peaks:])",
        "compute_us=tuple(rest[len(proposal.compute_us) :])",
        "the times of ranks in history are wrong when peaks are sent as well",
    ),
    Fault(
        "agree-cp-shares-not-equal", _AGREE,
        "return math.ceil(math.ceil(tokens / parts) / multiple) * multiple * parts",
        "return math.ceil(tokens / multiple) * multiple",
        "a sequence cannot be cut for context parallelism",
    ),
    # The runtime.
    Fault(
        "runtime-loses-the-last-weights-action", _RUNTIME,
        "return [*lowered, *rest]",
        "return lowered",
        "gradients of the last microbatch's stage are not summed over ranks",
    ),
    Fault(
        "arrivals-proof-too-early", _WAITING,
        "proven[send] = len(used[rank_of[send.to_stage], rank])",
        "proven[send] = len(used[rank_of[send.to_stage], rank]) + 1",
        "a rank waits for a send that its peer has not taken yet",
    ),
    Fault(
        "arrivals-no-proof-by-input-backwards", _WAITING,
        "            if proven[use] > known:\n",
        '            if proven[use] > known and action.kind != "I":\n',
        "zero-bubble schedules hold all of a step's messages in memory",
    ),
    Fault(
        "runtime-frees-the-outer-weights-only",
        _RUNTIME,
        "        for module in _sharded(stage):\n            module.reshard()\n",
        "        for module in _sharded(stage)[:1]:\n            module.reshard()\n",
        "the gathered weights of all blocks stay in memory, and a step computes with old ones",
    ),
    Fault(
        "runtime-sums-before-the-last-weight-gradient", _RUNTIME,
        'for action in program[self.rank] if action.kind != "F"}\n        self._last',
        'for action in program[self.rank] if action.kind == "B"}\n        self._last',
        "sums begin while weight gradients of other microbatches are missing",
    ),
    Fault(
        "runtime-held-sums-twice", _RUNTIME,
        "            stage.perform_reduce_grad(1)\n        self._held.clear()\n",
        "            stage.perform_reduce_grad(1)\n",
        "a stage hands its gradients to FSDP twice in a step",
    ),
    Fault(
        "runtime-old-arrivals-after-a-new-program", _RUNTIME,
        "        self._arrivals = {\n",
        '        self._arrivals = self.__dict__.get("_arrivals") or {\n',
        "the run fails when lookahead: auto changes the program",
    ),
    Fault(
        "runtime-offload-keeps-the-old-program", _RUNTIME,
        "            self.offload.load(program[self.rank])\n",
        '            "_arrivals" in self.__dict__ or self.offload.load(program[self.rank])\n',
        "activations come back in the wrong order when lookahead: auto changes the program",
    ),
    Fault(
        "runtime-still-waits-when-it-computes", _RUNTIME,
        "        if self.mark is not None:\n            self.mark(self.now)\n",
        "",
        "a hang in a kernel is blamed on the rank before it",
    ),
    Fault(
        "runtime-wait-is-not-marked", _RUNTIME,
        '            self.mark(f"{self.now} waits")\n',
        "            pass\n",
        "a hang is blamed on a rank that waits for a message",
    ),
    Fault(
        "runtime-input-backward-is-a-whole-one", _RUNTIME,
        'partial(self._backward, "I")',
        'partial(self._backward, "B")',
        "zero-bubble schedules fail in their weight passes",
    ),
    Fault(
        "runtime-messages-timed-as-whole-backwards", _RUNTIME,
        '"I" if kind == "B" and (index, microbatch) in self._split else kind',
        "kind",
        "measured costs of messages belong to the wrong kind of pass",
    ),
    Fault(
        "runtime-weight-backwards-add-in-bf16",
        _RUNTIME,
        "                add_to_sums(module)\n",
        "                pass\n",
        "with bf16 weights, zero-bubble schedules lose small gradients",
    ),
    # Posting.
    Fault(
        "posting-ahead-on-cuda", _POSTING,
        'return "ahead" if device_type == "cpu" else "one_order"',
        'return "ahead"',
        "NCCL deadlocks where kernels wait for all that was posted",
    ),
    Fault(
        "posting-order-of-starts", _POSTING,
        "sorted((slot.end, rank, index)",
        "sorted((slot.start, rank, index)",
        "receives are posted before what they depend on",
    ),
    Fault(
        "posting-never-forgets-used-receives", _POSTING,
        "            unused[source] -= 1\n            post(source, ahead)\n",
        "            post(source, ahead)\n",
        "after three messages a receive is posted only when it is needed",
    ),
    Fault(
        "posting-one-too-many", _POSTING,
        "while unused[source] < count and",
        "while unused[source] <= count and",
        "one buffer more for each channel",
    ),
    Fault(
        "posting-too-few-when-later-is-needed", _POSTING,
        "            while needed not in posted:\n",
        "            if needed not in posted:\n",
        "an action waits for a receive that was not posted",
    ),
    Fault(
        "posting-first-order-always", _POSTING,
        "return min(orders, key=cost)",
        "return orders[0]",
        "steps on NCCL take longer than they need",
    ),
    # Recovery.
    Fault(
        "policy-one-restart-too-many", _DEFAULT,
        "if in_vain >= self.max_restarts:",
        "if in_vain > self.max_restarts:",
        "max_restarts: 0 restarts once",
    ),
    Fault(
        "policy-preemptions-count", _DEFAULT,
        "        if not traits.counts:\n            return Restart(0.0)\n",
        "",
        "a preempted run waits, or ends",
    ),
    Fault(
        "policy-longest-delay-at-once", _DEFAULT,
        "min(_LONGEST_DELAY_S,",
        "max(_LONGEST_DELAY_S,",
        "each restart waits half a minute or more",
    ),
    Fault(
        "policy-nonfinite-never-retried", _DEFAULT,
        "cause.kind is FailureKind.NONFINITE and not self.restart_on_nonfinite",
        "cause.kind is FailureKind.NONFINITE",
        "on_nonfinite: restart has no effect",
    ),
    Fault(
        "policy-witness-is-the-cause", _POLICY,
        "next((failure for failure in failures if not failure.kind.traits.witness), failures[0])",
        "failures[0]",
        "the run says a peer was lost, not why",
    ),
    Fault(
        "policy-same-step-is-progress", _POLICY,
        "if _step(end) > _step(before):",
        "if _step(end) >= _step(before):",
        "a run that saves nothing restarts for ever",
    ),
    Fault(
        "policy-same-at-any-step", _POLICY,
        "if (before.kind, before.step) != (last.kind, last.step):",
        "if before.kind != last.kind:",
        "the second exception ends a run although it made progress",
    ),
    Fault(
        "policy-node-lost-once-is-bad", _POLICY,
        "lost = {failure.node for failure in end.failures if failure.kind.traits.node_lost and failure.node}",
        "lost = [failure.node for failure in end.failures if failure.kind.traits.node_lost and failure.node]",
        "a node whose two ranks were lost at once is avoided",
    ),
    Fault(
        "death-first-of-two-reports", _DEATH,
        "        pass\n",
        "        break\n",
        "the cause is an older crash in the same log",
    ),
    Fault(
        "death-one-kill-is-none", _DEATH,
        "evidence.oom_kills > 0",
        "evidence.oom_kills > 1",
        "a process that the kernel killed for memory ended without a trace",
    ),
    Fault(
        "death-exit-code-zero", _DEATH,
        "if code is not None and int(code[1]):",
        "if code is not None:",
        "a process killed by SIGKILL exited with code 0",
    ),
    Fault(
        "shape-last-device-unused", _SHAPE,
        "meshes = shapes(most, rows=rows",
        "meshes = shapes(most - 1, rows=rows",
        "an elastic run shrinks further than it must",
    ),
    Fault(
        "shape-experts-not-divided", _SHAPE,
        "elif longer.shards % ep == 0:",
        "else:",
        "an elastic run chooses a mesh on which experts cannot be spread",
    ),
    Fault(
        "shape-fsdp-shrinks-first", _SHAPE,
        "-one.replicas, -one.fsdp)",
        "-one.replicas, one.fsdp)",
        "the smaller mesh needs more memory on each device",
    ),
    Fault(
        "hang-message-from-the-wrong-side", _HANG,
        'stage - 1 if kind == "F" else stage + 1',
        'stage + 1 if kind == "F" else stage - 1',
        "a hang is blamed on the stage behind",
    ),
    Fault(
        "hang-silent-rank-is-there", _HANG,
        "if other.silent or _inner(other) != inner]",
        "if _inner(other) != inner]",
        "a rank that froze in a collective is not blamed",
    ),
    Fault(
        "hang-group-of-all-stages", _HANG,
        "and (whole_world or other.coordinates.pp == one.coordinates.pp)\n",
        "\n",
        "a hang in a stage's collective is blamed on another stage",
    ),
    Fault(
        "hang-silence-weighs-nothing", _HANG,
        "return activities[rank].silent, reached[rank], activities[rank].idle_s",
        "return False, reached[rank], activities[rank].idle_s",
        "a busy rank is blamed, not the frozen one",
    ),
    # How a stage is prepared.
    Fault(
        "apply-gradients-are-means", _APPLY,
        "            module.set_gradient_divide_factor(1.0)\n",
        "",
        "gradients shrink with the number of ranks",
    ),
    Fault(
        "apply-sums-rounded-to-bf16", _APPLY,
        "reduce_dtype=torch_dtype(dtypes.reduce)",
        "reduce_dtype=torch.bfloat16",
        "reduce_dtype: fp32 has no effect with bf16",
    ),
    Fault(
        "apply-pure-bf16-accumulates-in-bf16", _APPLY,
        "        sum_in(stage, torch_dtype(dtypes.gradients))\n",
        "        pass\n",
        "small gradients of many microbatches are lost on one device",
    ),
    Fault(
        "apply-recomputes-twice", _APPLY,
        'if extent != "none" and not within:',
        'if extent != "none":',
        "compile with selective recomputation recomputes blocks twice",
    ),
    Fault(
        "apply-routing-by-share", _APPLY,
        "            block.microbatch_group = groups.tokens\n",
        "            pass\n",
        "the balance of experts depends on cp",
    ),
    Fault(
        "apply-quantised-bytes-converted", _APPLY,
        "            elif parameter.is_floating_point():  # not the bytes of a quantised base\n",
        "            else:\n",
        "a quantised base is destroyed with bf16_pure",
    ),
    Fault(
        "apply-shared-quantised-weights-not-sharded", _APPLY,
        "if shards > 1 and job.mesh.ep < shards:",
        "if shards > 1 and job.mesh.ep <= shards:",
        "each rank copies quantised experts that only it has",
    ),
    # Layers over ranks.
    Fault(
        "tensor-every-rank-adds-the-bias", _TENSOR,
        "module.adds_bias = ranks.rank == 0",
        "module.adds_bias = True",
        "a bias of a block's output counts as often as there are ranks",
    ),
    Fault(
        "tensor-parts-begin-at-the-first", _TENSOR,
        "        first += length\n    return rows",
        "    return rows",
        "ranks compute keys and values with rows of the queries",
    ),
    Fault(
        "tensor-what-all-have-is-not-summed", _TENSOR,
        "if parameter.requires_grad and not is_split(parameter):",
        "if parameter.requires_grad and is_split(parameter):",
        "norms and routers learn from a part of the tokens, another on each rank",
    ),
    Fault(
        "tensor-norm-of-own-heads", _TENSOR,
        "squares = self.tensor.total(wide.square().sum(-1, keepdim=True))",
        "squares = wide.square().sum(-1, keepdim=True) * self.tensor.size",
        "heads that are normalised together are normalised rank by rank",
    ),
    Fault(
        "tensor-foreign-tokens-embedded", _TENSOR,
        "self.tensor.spread(part_BTC.masked_fill(elsewhere_BT[..., None], 0))",
        "self.tensor.spread(part_BTC)",
        "tokens of other ranks' rows of the vocabulary get an embedding from each rank",
    ),
    Fault(
        "tensor-dropout-of-the-first-columns", _TENSOR,
        "columns = ranks.part(adapted.in_features).start, adapted.in_features",
        "columns = 0, adapted.in_features",
        "an adapter drops other features than in one process",
    ),
    Fault(
        "tensor-decodes-the-part-of-one-rank", _TENSOR_RANKS,
        "return self.total(part_BTC)",
        "return part_BTC",
        "samples are those of a part of the heads",
    ),
    Fault(
        "tensor-fp8-scales-of-own-columns", _TENSOR,
        "return MatrixCut(inputs=ranks)",
        "return MatrixCut()",
        "ranks round their parts of a row to fp8 with scales of their own",
    ),
    # Backwards of compiled blocks, in halves.
    Fault(
        "halves-gradient-of-the-stand-in", _PRODUCTS,
        "return grad, None, grad, x\n",
        "return grad, None, grad, x.detach() * 1.0 + grad.sum() * 0.001\n",
        "weights learn from inputs that no product had",
    ),
    Fault(
        "halves-biases-stay", _PRODUCTS,
        "out = (self.fp8 or F.linear)(x, weight_here(self).detach(), bias)",
        "out = (self.fp8 or F.linear)(x, weight_here(self).detach(), None if bias is None else bias.detach())",
        "the biases of compiled blocks are not trained",
    ),
    Fault(
        "halves-stand-ins-stay", _PRODUCTS,
        "            for part in trained:\n                part.stand_ins = None\n",
        "            pass\n",
        "an evaluation after a step computes with the stand-ins of the last microbatch",
    ),
    Fault(
        "halves-whole-weights-learn-at-once", _PRODUCTS,
        "out = (self.fp8 or F.linear)(x, weight_here(self).detach(), bias)",
        "out = (self.fp8 or F.linear)(x, weight_here(self), bias)",
        "each matrix gets its gradient twice",
    ),
    # The loader.
    Fault(
        "loader-everyone-reads-the-first-share", _LOADER,
        "share = step[self.replica * self.rows : (self.replica + 1) * self.rows]",
        "share = step[: self.rows]",
        "all replicas train on the same rows",
    ),
    Fault(
        "loader-cursor-of-the-first-row", _LOADER,
        "yield share.microbatched(documents), step[-1][1]",
        "yield share.microbatched(documents), step[0][1]",
        "a resumed run repeats rows",
    ),
    Fault(
        "loader-seek-keeps-what-was-prepared", _LOADER,
        "        self.close()\n        self._cursor = cursor\n",
        "        self._cursor = cursor\n",
        "after a resume in the same process, the first steps are of the old place",
    ),
    Fault(
        "loader-other-data-accepted", _LOADER,
        "            if data != self.identity:\n",
        "            if False:\n",
        "a run continues silently with other data",
    ),
    Fault(
        "loader-last-evaluation-step-short", _LOADER,
        "own + [filler] * (share.rows - len(own))",
        "own",
        "an evaluation hangs or fails where rows do not divide",
    ),
    Fault(
        "loader-filler-counts", _LOADER,
        "np.array([NO_LABEL]), (1,))",
        "np.array([self.documents.tokenizer.eos_id]), (1,))",
        "the loss of an evaluation depends on the mesh",
    ),
    Fault(
        "loader-closed-for-ever", _LOADER,
        "            self._steps.close()\n            self._steps = None\n",
        "            self._steps.close()\n",
        "a loader that was closed cannot be used again",
    ),
    Fault(
        "loader-template-not-recorded", _LOADER,
        'return digests | ({"template": template} if template else {})',
        "return digests",
        "a resume with another chat template says that the files differ",
    ),
    Fault(
        "loader-budget-that-just-lasts", _LOADER,
        "if rows >= needed:",
        "if rows > needed:",
        "a mixture whose budget is exactly enough is refused",
    ),
]  # fmt: skip
