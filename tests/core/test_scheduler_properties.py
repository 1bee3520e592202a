"""Random requests, aborts, resets and preemptions: rules that no schedule may break, tokens that every schedule must give."""

from collections import deque

from checking_worker import CheckingWorker, expected_output
from core_builders import OverlappedScheduler, make_kv_cache_config, make_request, make_scheduler
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.core.output import ModelRunnerOutput, SchedulerOutput
from jaxllm.core.request import Request, RequestStatus
from jaxllm.core.scheduler import Scheduler
from jaxllm.core.types import FinishReason

BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
SALTS = {None: 0, "pepper": 1}


class SchedulerMachine(RuleBasedStateMachine):
    """Steps a scheduler with a worker checking the cache; in one mode, the next step is scheduled before the last is known."""

    @initialize(
        windows=st.sampled_from([(None,), (None,), (6,), (None, 6), (None, 3, 10)]),
        spare_blocks=st.sampled_from([0, 2, 5, 9]),
        mode=st.sampled_from(["plain", "overlapped", "drafts"]),
        policy=st.sampled_from(["fcfs", "priority"]),
        max_num_seqs=st.integers(2, 5),
        max_num_batched_tokens=st.integers(5, 30),
        chunked=st.booleans(),
        threshold=st.sampled_from([0, 0, 3, 7]),
        must_fit=st.booleans(),
        caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.2]),
        lookahead=st.integers(0, 3),
    )
    def start(
        self,
        windows: tuple[int | None, ...],
        spare_blocks: int,
        mode: str,
        policy: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked: bool,
        threshold: int,
        must_fit: bool,
        caching: bool,
        watermark: float,
        lookahead: int,
    ) -> None:
        self.mode, self.lookahead = mode, lookahead
        num_blocks = 1 + len(windows) * (MAX_MODEL_LEN // BLOCK_SIZE) + spare_blocks
        self.scheduler = make_scheduler(
            cls=OverlappedScheduler if mode == "overlapped" else Scheduler,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            windows=windows,
            enable_prefix_caching=caching,
            watermark=watermark,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens if chunked else max(max_num_batched_tokens, MAX_MODEL_LEN),
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold,
            full_sequence_must_fit=must_fit,
            num_lookahead_tokens=lookahead if mode == "drafts" else 0,
        )
        self.roots: dict[str, int] = {}
        self.worker = CheckingWorker(
            make_kv_cache_config(num_blocks, BLOCK_SIZE, windows),
            self.roots,
            # Two of three drafts are right.
            draft=lambda prefix, token_id: token_id if prefix % 3 else token_id + 1,
        )
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.aborted: set[str] = set()
        self.num_requests = 0

    @rule(
        arrivals=st.lists(
            st.tuples(
                st.sampled_from([0, 5, 9]),  # shared tokens
                st.integers(1, 13),  # tokens of its own
                st.integers(2, 3),
                st.sampled_from([1, 3, 8, 15, 20]),
                st.integers(0, 2),
                st.sampled_from([None, None, None, "pepper"]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def add(self, arrivals: list[tuple[int, int, int, int, int, str | None]]) -> None:
        for num_shared, num_own, token_id, max_tokens, priority, salt in arrivals:
            self.num_requests += 1
            request = make_request(
                f"r{self.num_requests}",
                [*range(100, 100 + num_shared), *[token_id] * num_own],
                self.scheduler.block_hasher,
                max_tokens=max_tokens,
                # Later ones tend to be more urgent: only then is a victim served before the request that needs its blocks.
                priority=priority - self.num_requests // 2,
                arrival_time=float(self.num_requests),
                cache_salt=salt,
                client_index=self.num_requests % 2,
            )
            self.roots[request.request_id] = SALTS[salt]
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []
            self.scheduler.add_request(request)

    @rule(num_steps=st.integers(1, 5))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            self.scheduler.check_integrity()

    def step(self) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        alone = len(scheduler.requests) == 1
        output = scheduler.schedule()
        scheduled = output.num_scheduled_tokens
        assert output.total_num_scheduled_tokens == sum(scheduled.values()) <= config.max_num_batched_tokens
        assert all(n > 0 for n in scheduled.values())
        assert len(scheduler.running) <= config.max_num_seqs
        assert not scheduled.keys() & self.aborted
        if config.long_prefill_token_threshold and not alone:
            assert max(scheduled.values(), default=0) <= config.long_prefill_token_threshold
        if output.scheduled_new_reqs and output.preempted_req_ids:
            # Only requests preempted by a reset, before the step, may come back in it.
            assert {data.req_id for data in output.scheduled_new_reqs}.isdisjoint(self.preempted_in(output))
        self.in_flight.append((output, self.worker.execute(output)))
        if self.mode != "overlapped" or len(self.in_flight) == 2:
            self.take_output()
        if self.mode == "drafts" and self.lookahead:
            scheduler.update_draft_token_ids(*self.worker.propose(self.lookahead))

    def preempted_in(self, output: SchedulerOutput) -> set[str]:
        return {name for name in output.preempted_req_ids if name in self.scheduler.waiting}

    def take_output(self) -> None:
        for client, outputs in self.scheduler.update_from_output(*self.in_flight.popleft()).items():
            for out in outputs.outputs:
                request = self.requests[out.request_id]
                assert request.client_index == client
                assert out.new_token_ids
                assert out.request_id not in self.aborted
                assert out.request_id not in self.reasons
                self.outputs[out.request_id] += out.new_token_ids
                if out.finished:
                    self.reasons[out.request_id] = out.finish_reason
                    assert out.request_id in outputs.finished_requests

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), what=st.sampled_from(["abort", "abort", "abort", "reset", "reset all"]))
    def interfere(self, data: st.DataObject, what: str) -> None:
        if what == "abort":
            request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            self.aborted.add(request_id)
        else:
            idle = not self.scheduler.running
            assert self.scheduler.reset_prefix_cache(what == "reset all") == (idle or what == "reset all")

    @invariant()
    def books_balance(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.requests.keys() == self.requests.keys() - self.reasons.keys() - self.aborted

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(400):
            if not self.scheduler.has_requests():
                break
            self.run(5)
        while self.in_flight:
            self.take_output()
        assert not self.scheduler.has_unfinished_requests(), "requests wait for ever"
        assert self.scheduler.kv_cache_manager.usage == 0.0
        assert not self.scheduler._num_orphaned_steps
        for request_id, request in self.requests.items():
            prompt = request.prompt_token_ids
            expected = expected_output(prompt, request.max_tokens, MAX_MODEL_LEN, self.roots[request_id])
            if request_id in self.aborted:
                assert self.outputs[request_id] == expected[: len(self.outputs[request_id])]
            else:
                assert self.outputs[request_id] == expected
                assert self.reasons[request_id] is (FinishReason.STOP if expected[-1] == 2 else FinishReason.LENGTH)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
