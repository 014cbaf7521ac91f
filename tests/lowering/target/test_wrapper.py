"""Inductor's wrapper as events, of programs that are cut into partitions too; and the verdict on recording."""

from __future__ import annotations

import pytest

from gradsync_fx.lowering.target.recording import recording_of
from gradsync_fx.lowering.target.wrapper import NotUnderstood, read


KERNEL = """
triton_poi_0 = async_compile.triton('triton_poi_0', '''
def triton_poi_0(in_ptr0, out_ptr0, xnumel, XBLOCK):
    tmp0 = tl.load(in_ptr0)
    tmp1 = tmp0 + tmp0
    tl.store(out_ptr0, tmp1)
''', device_str='cuda')
"""
WHOLE = (
    KERNEL
    + """
def call(args):
    arg0_1, scalar_1 = args
    args.clear()
    buf0 = empty_strided_cuda((4, ), (1, ), torch.float32)
    # [Provenance debug handles] triton_poi_0:7
    raw_stream0 = get_raw_stream(0)
    triton_poi_0.run(arg0_1, buf0, 4, stream=raw_stream0)
    buf1 = reinterpret_tensor(buf0, (2, ), (1, ), 2)
    extern_kernels.mm(buf1, arg0_1, out=arg0_1)
    return (buf0, )
"""
)
PARTS = (
    KERNEL
    + """
def partition_0(args):
    mine, zuf0 = args
    args.clear()
    zuf0 = zuf0
    with torch.cuda._DeviceGuard(0):
        buf2 = empty_strided_cuda((4, ), (1, ), torch.float32)
        triton_poi_0.run(mine, buf2, 4, stream=raw_stream0)
    return (buf2, )

class Runner:
    def call(self, args):
        arg0_1, scalar_1 = args
        args.clear()
        buf0 = empty_strided_cpu_pinned((1, ), (1, ), torch.float64)
        cpp_fused_0(scalar_1, buf0)
        zuf0 = scalar_1.item()
        buf1 = empty_strided_cuda((1, ), (1, ), torch.float64)
        buf1.copy_(buf0, True)
        partition0_args = [arg0_1, NUMBER]
        (out,) = self.partitions[0](partition0_args)
        extern_kernels.mm(out, out, out=arg0_1)
        return (out, )
"""
)
DEVICES = {"parameter w": "cuda", "scalar lr": "cpu"}


def test_a_program_of_one_piece() -> None:
    found = read(WHOLE)
    assert found.inputs == ("arg0_1", "scalar_1")
    launch, product = found.events
    assert (launch.kind, launch.name, launch.call) == ("launch", "triton_poi_0", 7)
    assert (launch.reads, launch.writes) == (("arg0_1",), ("buf0",))
    assert (product.kind, product.reads) == ("extern", ("buf0", "arg0_1"))  # a view of buf0
    assert product.call == 0
    assert recording_of(found, DEVICES, "").verdict == "whole"


def test_partitions_are_read_where_they_are_called() -> None:
    found = read(PARTS.replace("NUMBER", "buf1"))
    assert found.partitions == 1
    assert found.numbers == ()
    assert [(e.kind, e.partition) for e in found.events] == [
        ("host", None),
        ("read", None),
        ("upload", None),
        ("launch", 0),
        ("extern", None),
    ]
    *_, launch, product = found.events
    assert launch.reads == ("arg0_1",)
    assert product.reads == ("buf2",)
    verdict = recording_of(found, DEVICES, "")
    assert verdict.verdict == "in parts"
    assert verdict.why == ("1 CPU kernel", "1 host read", "1 upload")


def test_a_number_in_a_partition_is_not_seen_to_change() -> None:
    found = read(PARTS.replace("NUMBER", "zuf0"))
    assert found.numbers == ("zuf0",)
    verdict = recording_of(found, DEVICES, "")
    assert verdict.verdict == "no"
    assert "a replay would not see another value" in verdict.why[-1]


def test_a_copy_from_ordinary_memory_is_waited_for() -> None:
    found = read(PARTS.replace("NUMBER", "buf1").replace("cpu_pinned", "cpu"))
    assert [e.kind for e in found.events if e.kind in ("upload", "transfer")] == ["transfer"]


def test_inductors_own_reason_counts() -> None:
    verdict = recording_of(read(WHOLE), {"size n": "size"}, "mutated inputs")
    assert verdict.verdict == "no"
    assert verdict.why == ("mutated inputs", "one recording for each value of size n")


@pytest.mark.parametrize("line", ["unknown(buf0)", "if arg0_1 > 3: pass"])
def test_what_is_not_understood_is_not_passed_over(line: str) -> None:
    with pytest.raises(NotUnderstood):
        read(WHOLE.replace("args.clear()", line))
