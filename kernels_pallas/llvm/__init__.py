"""Kernels for CPUs with AVX-512: functions in LLVM's language, compiled at start and called by XLA as foreign functions.

What XLA:CPU makes of a decode step is far from what the machine can do: it copies the pages of the KV cache before it multiplies,
and its products of a few dozen rows reach half of the arithmetic. These kernels read pages where they lie, and weights in the
order in which the registers want them. See docs/cpu.md.

`code` writes functions, `foreign_call` makes of one what XLA can call, `library` compiles and registers; `matmul` and
`paged_attention` are the kernels.
"""
