"""The plan itself, as data and as text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.plan.abstract_worker import AbstractWorker
from jaxllm.plan.roofline import Roofline
from jaxllm.worker.buckets import Bucket
from jaxllm.worker.kv_cache import total_bytes
from jaxllm.worker.row_state import state_bytes
from kernels_pallas.aot import KernelResources, Program, Target

MIB = 2**20
MOST_KERNELS = 8


def make_plan(
    config: EngineConfig,
    target: Target,
    *,
    rows: Sequence[int],
    context: int,
    prompts: Sequence[int],
    kernels: bool = True,
) -> dict[str, Any]:
    """Compile the largest step of each kind, size the KV cache as the engine does, and work out the roofline.

    Args:
        rows: decode batch sizes to time, `context` tokens a request.
        prompts: prompt lengths to time.
        kernels: read registers, spills and shared memory of each kernel.

    Raises:
        ValueError: if the model does not fit, or cannot be shared by so many devices.
    """
    worker = AbstractWorker(replace(config, compilation_cache_dir=None), target, kernels)
    worker.init_device()
    worker.load_model()
    kv_cache = worker.determine_available_memory()
    buckets = worker.runner.buckets
    steps = {bucket: worker.program(bucket) for bucket in (buckets.mixed[-1], buckets.decode[-1])}
    num_devices = len(worker.devices)
    num_tokens = (kv_cache.num_blocks - 1) * config.cache.block_size // len(kv_cache.groups)
    roofline = Roofline.of(config, worker.specs, target)
    most_rows = min(config.scheduler.max_num_seqs, num_tokens // context)
    return {
        "model": config.model.model,
        "device": target.device_kind,
        "num_devices": num_devices,
        "dtype": config.model.dtype,
        "memory": {
            "device_bytes": target.memory_bytes,
            "usable_bytes": int(config.cache.gpu_memory_utilization * target.memory_bytes),
            "weight_bytes": total_bytes(worker.weights),
            "row_bytes": state_bytes(worker.runner.abstract_state()),
            "kv_cache_bytes": kv_cache.num_blocks * kv_cache.block_bytes // num_devices,
        },
        "kv_cache": {
            "dtype": config.kv_cache_dtype,
            "num_blocks": kv_cache.num_blocks - 1,
            "block_size": config.cache.block_size,
            "num_tokens": num_tokens,
        },
        "steps": [_step(bucket, program) for bucket, program in steps.items()],
        "roofline": {
            "context": context,
            "saturation_rows": roofline.saturation_rows,
            "decode": [_decode(roofline, size, context) for size in rows],
            "prefill": [
                {"tokens": size, "ms": 1e3 * (time := roofline.prefill_seconds(size)), "tokens_per_s": size / time}
                for size in prompts
            ],
            "ceiling": _decode(roofline, most_rows, context) if most_rows else None,
        },
    }


def _decode(roofline: Roofline, num_rows: int, context: int) -> dict[str, float]:
    seconds = roofline.decode_seconds(num_rows, context)
    return {"rows": num_rows, "ms": 1e3 * seconds, "tokens_per_s": num_rows / seconds}


def _step(bucket: Bucket, program: Program) -> dict[str, Any]:
    memory = program.memory
    collectives = [collective for collective in program.hlo.collectives if collective.always]
    return {
        "bucket": str(bucket),
        "compile_seconds": program.seconds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "in_place_bytes": memory.alias_size_in_bytes,
        "collectives": dict(Counter(collective.kind for collective in collectives)),
        "collective_bytes": sum(collective.num_bytes for collective in collectives),
        "launches": len(program.thunks.kinds),
        "one_command_buffer": program.thunks.kinds == ["kCommandBuffer"],
        "host_calls": program.hlo.host_calls,
        "kernels": [_kernel(kernel) for kernel in program.kernels],
    }


def _kernel(kernel: KernelResources) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
    }


def plan_text(plan: dict[str, Any]) -> str:
    """For people."""
    memory, cache, roofline = plan["memory"], plan["kv_cache"], plan["roofline"]
    lines = [
        f"{plan['model']} in {plan['dtype']} on {plan['num_devices']} x {plan['device']}",
        "",
        "Memory of a device, MiB",
        *(f"  {name:<24}{memory[f'{key}_bytes'] / MIB:>10,.0f}" for name, key in _MEMORY),
        f"  {'left for temporaries':<24}{_left(plan) / MIB:>10,.0f}",
        f"KV cache in {cache['dtype']}: {cache['num_blocks']:,} blocks of {cache['block_size']}, {cache['num_tokens']:,} tokens",
    ]
    for step in plan["steps"]:
        lines += ["", *_step_lines(step)]
    lines += [
        "",
        f"Times that the device allows at best, {roofline['context']} tokens of context",
        f"  {'decode rows':>12}{'ms':>10}{'tokens/s':>12}",
        *(f"  {row['rows']:>12}{row['ms']:>10.2f}{row['tokens_per_s']:>12,.0f}" for row in roofline["decode"]),
        f"  {'prompt':>12}{'ms':>10}{'tokens/s':>12}",
        *(f"  {row['tokens']:>12}{row['ms']:>10.2f}{row['tokens_per_s']:>12,.0f}" for row in roofline["prefill"]),
        f"B_sat, the rows from which on decoding is bound by computing: {roofline['saturation_rows']:.0f}",
    ]
    ceiling = roofline["ceiling"]
    if ceiling is None:
        lines.append("Ceiling: the KV cache holds no request of so many tokens")
    else:
        lines.append(f"Ceiling: {ceiling['tokens_per_s']:,.0f} tokens/s, {ceiling['rows']} requests at a time")
    return "\n".join(lines)


_MEMORY = (("all", "device"), ("may be used", "usable"), ("weights", "weight"), ("request rows", "row"), ("KV cache", "kv_cache"))


def _left(plan: dict[str, Any]) -> int:
    memory = plan["memory"]
    return memory["usable_bytes"] - memory["weight_bytes"] - memory["row_bytes"] - memory["kv_cache_bytes"]


def _step_lines(step: dict[str, Any]) -> list[str]:
    launches = "one command buffer" if step["one_command_buffer"] else f"{step['launches']} launches"
    moves = ", ".join(f"{count} {kind}" for kind, count in step["collectives"].items()) or "none"
    lines = [
        f"Step {step['bucket']} (compiled in {step['compile_seconds']:.0f} s): {launches}",
        f"  temporaries {step['temporary_bytes'] / MIB:,.0f} MiB, in place {step['in_place_bytes'] / MIB:,.0f} MiB, "
        f"communication: {moves}" + (f" ({step['collective_bytes'] / MIB:,.1f} MiB)" if step["collectives"] else ""),
    ]
    if step["host_calls"]:
        lines.append(f"  calls of the host: {', '.join(step['host_calls'])}")
    kernels = step["kernels"]
    if kernels:
        spilling = [kernel for kernel in kernels if kernel["spill_bytes"]]
        shown = sorted(kernels, key=lambda kernel: (-kernel["spill_bytes"], -kernel["registers"]))[:MOST_KERNELS]
        lines.append(f"  {len(kernels)} kernels, {len(spilling)} of them spill registers; the largest:")
        lines.append(f"    {'registers':>9} {'spilled B':>9} {'shared B':>9}  name")
        lines += [
            f"    {kernel['registers']:>9} {kernel['spill_bytes']:>9} {kernel['shared_bytes']:>9}  {kernel['name']}"
            for kernel in shown
        ]
    return lines
