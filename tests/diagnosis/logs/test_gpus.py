from __future__ import annotations

from diagnosis.logs.gpus import GpuReader
from diagnosis.story import LineMatch, LogStory
from diagnosis.taxonomy import FailureClass

NCCL = "n1:77:{t} [{i}] NCCL INFO comm 0x55d rank {r} nranks {n} cudaDev {i} nvmlDev {i} busId {bus} commId 0x9"
SMI = """==============NVSMI LOG==============

Attached GPUs                             : 2
GPU 00000000:19:00.0
    GPU UUID                              : GPU-11111111-aaaa-bbbb-cccc-222222222222
    Clocks Event Reasons
            HW Thermal Slowdown           : Not Active
    Temperature
        GPU Current Temp                  : 51 C

GPU 00000001:C1:00.0
    GPU UUID                              : GPU-33333333-aaaa-bbbb-cccc-444444444444
    Temperature
        GPU Current Temp                  : 91 C
    Clocks Event Reasons
            HW Thermal Slowdown           : Active
"""


def test_ranks_of_the_whole_job_are_those_of_the_largest_communicator() -> None:
    lines = [NCCL.format(t=r, i=r % 4, r=r, n=8, bus=f"{0x19000 + 0x10000 * r:x}") for r in range(8)]
    lines += [NCCL.format(t=r, i=3 - r, r=r, n=4, bus="1c1000") for r in range(4)]
    reader = GpuReader()
    reader.feed("\n".join(lines).encode(), 1)

    told = reader.told(LogStory(source="log")).gpus

    assert told == {r: (r % 4, f"0000:{0x19 + 0x10 * r:02x}:00") for r in range(8)}


def test_in_a_file_of_one_rank_any_communicator_tells_its_gpu() -> None:
    reader = GpuReader()
    reader.feed(NCCL.format(t=1, i=3, r=1, n=2, bus="1c1000").encode(), 1)

    assert reader.told(LogStory(source="log", rank=57)).gpus == {57: (3, "0001:c1:00")}


def test_a_slow_down_in_a_report_is_of_the_gpu_in_whose_part_it_stands() -> None:
    line = next(n for n, text in enumerate(SMI.split("\n"), 1) if text.endswith("Slowdown           : Active"))
    match = LineMatch(
        rule="thermal",
        role="cause",
        failure_class=FailureClass.GPU_THERMAL_POWER,
        confidence=0.75,
        severity="error",
        scope="gpu",
        text="            HW Thermal Slowdown           : Active",
        line=line,
    )
    reader = GpuReader()
    reader.feed(SMI.encode(), 1)

    (told,) = reader.told(LogStory(source="smi.txt", matches=(match,))).matches

    assert told.fields == {"device": "0001:c1:00", "uuid": "GPU-33333333-aaaa-bbbb-cccc-444444444444"}
    assert told.text == "HW Thermal Slowdown : Active at 91 °C"


def test_what_names_no_gpu_changes_nothing() -> None:
    story, reader = LogStory(source="log"), GpuReader()
    reader.feed(b"step 1 loss 2\n busId nothing\n    HW Thermal Slowdown : Active", 1)

    assert reader.told(story) is story
