"""What is known of the GPUs that programs are compiled for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A GPU model.

    Attributes:
        name: short.
        device_kind: as the driver names it.
        compute_capability: (major, minor).
        num_cores: streaming multiprocessors.
        lanes_per_core: float32 lanes of one.
        shared_memory_per_core, shared_memory_per_block: bytes; the latter is the most that one block may ask for.
        l2_bytes, memory_bytes: of the device.
        memory_bandwidth: bytes a second.
        clock_ghz: boost clock.
        bf16_flops: dense tensor-core operations a second, a multiply-add counted as two.
        link_bandwidth: bytes a second that one device can send to the others (NVLink, one direction).
        num_links: NVLink links.
    """

    name: str
    device_kind: str
    compute_capability: tuple[int, int]
    num_cores: int
    lanes_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    l2_bytes: int
    memory_bytes: int
    memory_bandwidth: float
    clock_ghz: float
    bf16_flops: float
    link_bandwidth: float
    num_links: int

    def description(self) -> str:
        """The device as XLA's compiler wants it: a GpuTargetConfigProto in text form."""
        major, minor = self.compute_capability
        # Instructions of one generation alone (wgmma, tcgen05): what Mosaic kernels are made of.
        accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        suffix = "a" if major >= 9 else ""
        return f"""
gpu_device_info {{
  name: "{self.device_kind}"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{suffix}"
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  core_count: {self.num_cores}
  fpus_per_core: {self.lanes_per_core}
  clock_rate_ghz: {self.clock_ghz}
  memory_bandwidth: {int(self.memory_bandwidth)}
  device_memory_size: {self.memory_bytes}
  l2_cache_size: {self.l2_bytes}
  shared_memory_per_core: {self.shared_memory_per_core}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_memory_per_block}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  threads_per_warp: 32
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {self.num_links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.device_kind}"
"""


# Cores, caches, clocks and usable memory: what the driver reports of such a device, as collected in OpenXLA's own target
# descriptions. Bandwidths and tensor-core rates: NVIDIA's data sheets (dense, without sparsity) of the SXM models.
TARGETS = {
    target.name: target
    for target in (
        Target(
            name="h200",
            device_kind="NVIDIA H200",
            compute_capability=(9, 0),
            num_cores=132,
            lanes_per_core=128,
            shared_memory_per_core=233472,
            shared_memory_per_block=232448,
            l2_bytes=52428800,
            memory_bytes=151397597184,
            memory_bandwidth=4.8e12,
            clock_ghz=1.98,
            bf16_flops=989e12,
            link_bandwidth=450e9,
            num_links=18,
        ),
        Target(
            name="h100",
            device_kind="NVIDIA H100 80GB HBM3",
            compute_capability=(9, 0),
            num_cores=132,
            lanes_per_core=128,
            shared_memory_per_core=233472,
            shared_memory_per_block=232448,
            l2_bytes=52428800,
            memory_bytes=84942979072,
            memory_bandwidth=3.35e12,
            clock_ghz=1.98,
            bf16_flops=989e12,
            link_bandwidth=450e9,
            num_links=18,
        ),
        Target(
            name="a100",
            device_kind="NVIDIA A100-SXM4-80GB",
            compute_capability=(8, 0),
            num_cores=108,
            lanes_per_core=64,
            shared_memory_per_core=167936,
            shared_memory_per_block=166912,
            l2_bytes=41943040,
            memory_bytes=85100068864,
            memory_bandwidth=2.039e12,
            clock_ghz=1.41,
            bf16_flops=312e12,
            link_bandwidth=300e9,
            num_links=12,
        ),
        Target(
            name="b200",
            device_kind="NVIDIA B200",
            compute_capability=(10, 0),
            num_cores=148,
            lanes_per_core=128,
            shared_memory_per_core=233472,
            shared_memory_per_block=232448,
            l2_bytes=132644864,
            memory_bytes=191514411008,
            memory_bandwidth=7.7e12,
            clock_ghz=1.965,
            bf16_flops=2250e12,
            link_bandwidth=900e9,
            num_links=18,
        ),
    )
}
