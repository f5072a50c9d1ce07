"""A device: NVIDIA's H20, for plans on clusters of it (`--cluster 8xH20`)."""

from paceline.cluster.catalogue.accelerator import Accelerator, LinkSpec

H20 = Accelerator(
    name="H20",
    kind="cuda",
    peak_flops={"fp64": 1e12, "fp32": 44e12, "tf32": 74e12, "bf16": 148e12, "fp16": 148e12, "fp8": 296e12},
    memory_bytes=96 * 2**30,
    memory_bandwidth=4.0e12,
    inside=LinkSpec("NVLink 4", bandwidth=450e9, latency_s=3.4e-6),
    network=LinkSpec("network of 400 Gbit/s", bandwidth=50e9, latency_s=14e-6),
    multiprocessors=78,
    sources={"all": "H20 data sheet", "network": "assumed, as an H100's"},
)
