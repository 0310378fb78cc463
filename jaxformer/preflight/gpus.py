"""What XLA must know about a GPU to compile for it when none is attached: `GpuTargetConfigProto` in text form.

The numbers are those that CUDA reports for the devices (cudaDeviceProp), and those of NVIDIA's data sheets.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuTarget:
    device: str
    capability: int
    """Major compute capability."""
    cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    shared_per_core: int
    shared_per_block: int
    """Largest shared memory that a block can ask for."""
    l2_cache: int
    clock_ghz: float
    memory: int
    memory_speed: int

    def to_text(self) -> str:
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared_per_core}
              shared_memory_per_block_optin: {self.shared_per_block}
              threads_per_core_limit: 2048
              core_count: {self.cores}
              fpus_per_core: {self.fpus_per_core}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {self.memory_speed}
              l2_cache_size: {self.l2_cache}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              cuda_compute_capability {{ major: {self.capability} }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.device}"
        """


_HOPPER = {"capability": 9, "cores": 132, "fpus_per_core": 128, "shared_per_core": 233_472, "shared_per_block": 232_448}

TARGETS: dict[str, str] = {
    name: target.to_text()
    for name, target in {
        "a100": GpuTarget(
            "NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 166_912, 41_943_040, 1.41, 80 * 10**9, 2_039 * 10**9
        ),
        "h100": GpuTarget(
            "NVIDIA H100 80GB HBM3",
            l2_cache=52_428_800, clock_ghz=1.98, memory=80 * 10**9, memory_speed=3_350 * 10**9, **_HOPPER,
        ),
        "h200": GpuTarget(
            "NVIDIA H200",
            l2_cache=62_914_560, clock_ghz=1.98, memory=141 * 10**9, memory_speed=4_800 * 10**9, **_HOPPER,
        ),
        "b200": GpuTarget(
            "NVIDIA B200", 10, 148, 128, 233_472, 232_448, 132_644_864, 1.965, 180 * 10**9, 7_700 * 10**9
        ),
    }.items()
}  # fmt: skip
