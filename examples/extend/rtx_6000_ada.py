"""A device: NVIDIA's RTX 6000 of the Ada generation, for plans on clusters of it (`--cluster 8xRTX-6000-Ada`)."""

from paceline.cluster.catalogue import Accelerator, LinkSpec

RTX_6000_ADA = Accelerator(
    name="RTX-6000-Ada",
    kind="cuda",
    peak_flops={
        "fp64": 1.42e12,
        "fp32": 91.1e12,
        "tf32": 182.1e12,
        "bf16": 364.2e12,
        "fp16": 364.2e12,
        "fp8": 728.5e12,
    },
    memory_bytes=48 * 2**30,
    memory_bandwidth=0.96e12,
    inside=LinkSpec("PCIe 4 x16", bandwidth=32e9, latency_s=5.7e-6),
    network=LinkSpec("network of 100 Gbit/s", bandwidth=12.5e9, latency_s=14e-6),
    multiprocessors=142,
    generation="ada",
    power_w=300,
    sources={"all": "RTX 6000 Ada data sheet", "network": "assumed: 100 Gbit/s for each"},
)
