"""Which GPUs a run may use and what joins them, asked of a stand-in for the driver.

The machines that run these tests have none.

Wrong here: ranks on a GPU that belongs to somebody else, or a run that does not start on a GPU whose driver leaves a
question open.
"""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from paceline.cluster.machine import read_gpus

SWITCH = "switch"


class Driver:
    """GPUs that answer what real ones do. `nvlinks[gpu]` lists each link's other end: a GPU's number, or the switch."""

    NVMLError = pynvml.NVMLError
    NVML_NVLINK_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS
    NVML_NVLINK_STATE_ACTIVE = pynvml.NVML_NVLINK_STATE_ACTIVE
    NVML_NVLINK_DEVICE_TYPE_SWITCH = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH

    def __init__(self, uuids: list[str], nvlinks: list[list[int | str]] | None = None) -> None:
        self.uuids, self.nvlinks = uuids, nvlinks or [[] for _ in uuids]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "595.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, gpu: int) -> str:
        return self.uuids[gpu]

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return f"GPU {gpu}"

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(total=(gpu + 1) * 2**30)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        return (7, 5) if gpu == 0 else (9, 0)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: int) -> int:
        return 16

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return SimpleNamespace(busId=f"00000000:0{gpu}:00.0")

    def _end(self, gpu: int, link: int) -> int | str:
        if link >= len(self.nvlinks[gpu]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.nvlinks[gpu][link]

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> Any:
        self._end(gpu, link)
        return pynvml.NVML_NVLINK_STATE_ACTIVE

    def nvmlDeviceGetNvLinkVersion(self, gpu: int, link: int) -> Any:
        return pynvml.NVML_NVLINK_VERSION_4_0

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> Any:
        switch = self._end(gpu, link) == SWITCH
        return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:
        return SimpleNamespace(busId=f"00000000:0{self._end(gpu, link)}:00.0")


class BareDriver(Driver):
    """GPUs that share the host's memory and leave every question open but who they are."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and not name.endswith(("Count", "ByIndex", "GetName")):
            return self.refuse
        return super().__getattribute__(name)

    def refuse(self, *_: Any) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


FOUR = ["GPU-aa1", "GPU-aa2", "GPU-bb1", "GPU-cc1"]


def test_the_stand_in_answers_only_questions_that_the_driver_knows() -> None:
    assert [name for name in vars(Driver) if name.startswith("nvml") and not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU 2", "GPU 0"]),
        ("1, 3", ["GPU 1", "GPU 3"]),
        ("0,7,1", ["GPU 0"]),
        ("GPU-bb", ["GPU 2"]),
        ("GPU-aa", []),
        ("MIG-1234", []),
    ],
)
def test_only_the_visible_gpus_are_used_in_their_order(visible: str | None, names: list[str]) -> None:
    gpus = read_gpus(Driver(FOUR), visible)
    assert [gpu.name for gpu in gpus.devices] == names
    assert [gpu.index for gpu in gpus.devices] == list(range(len(names)))
    assert gpus.driver == "595.1"


def test_a_gpu_states_its_memory_and_whether_it_computes_in_bf16() -> None:
    assert [(gpu.memory_bytes, gpu.bf16) for gpu in read_gpus(Driver(FOUR[:2]), None).devices] == [
        (2**30, False),
        (2**31, True),
    ]


def test_links_between_the_same_two_gpus_add_up_and_count_once() -> None:
    gpus = read_gpus(Driver(FOUR[:3], [[1, 1, 2], [0, 0], [0]]), None)
    nvlinks = {link.name: link.bandwidth_gbps for link in gpus.links if link.kind == "nvlink"}
    assert nvlinks == {"cuda:0-cuda:1": 400.0, "cuda:0-cuda:2": 200.0}


def test_a_gpu_on_a_switch_has_one_link_of_all_its_lanes() -> None:
    gpus = read_gpus(Driver(FOUR[:2], [[SWITCH] * 18, [SWITCH] * 18]), None)
    nvlinks = {link.name: link.bandwidth_gbps for link in gpus.links if link.kind == "nvlink"}
    assert nvlinks == {"cuda:0-switch": 3600.0, "cuda:1-switch": 3600.0}


def test_links_to_gpus_that_we_may_not_use_are_left_out() -> None:
    gpus = read_gpus(Driver(FOUR[:2], [[1], [0]]), "1")
    assert [(link.name, link.kind) for link in gpus.links] == [("cuda:0-host", "pcie")]
    assert gpus.links[0].bandwidth_gbps == pytest.approx(252.064)


def test_a_gpu_that_leaves_questions_open_is_used_all_the_same() -> None:
    gpus = read_gpus(BareDriver(FOUR[:1]), None)
    assert gpus.devices[0].memory_bytes > 0
    assert gpus.devices[0].bf16 is None
    assert [link.bandwidth_gbps for link in gpus.links] == [None]
