"""No code in a pickle is executed."""

import os
import pickle

import numpy as np
import pytest
import weight_files as make
from processes import python
from weight_files import read


class _Payload:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def malicious_objects(marker):
    code = f"open({str(marker)!r}, 'w').close()"
    inner = {"deep": [({"x": _Payload(eval, code)},)]}
    return {
        "posix.system": _Payload(os.system, f"touch {marker}"),
        "builtins.eval": _Payload(eval, code),
        "builtins.exec": {"state_dict": {"a": _Payload(exec, code)}},
        "builtins.eval nested": {"a": 1, "b": inner},
        "builtins.getattr": _Payload(getattr, os, "system"),
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("container", ["zip", "legacy", "first"])
def test_a_pickle_that_runs_code_is_refused_by_name(tmp_path, protocol, container):
    marker = tmp_path / "ran"
    for name, payload in malicious_objects(marker).items():
        if name == "builtins.getattr":
            pickled = pickle.dumps(getattr, protocol)
        else:
            pickled = pickle.dumps(payload, protocol)
            pickle.loads(pickled)
            assert marker.exists()  # the payload works where it is executed
            marker.unlink()
        if container == "zip":
            data = make.torch_zip(pickled, {})
        else:
            data = make.torch_legacy(pickled, {}) if container == "legacy" else pickled
        expected = name.split()[0].replace("builtins", "(builtins|__builtin__)")
        with pytest.raises(ValueError, match=f"refers to {expected}. Nothing was run"):
            read(tmp_path, data)
        assert not marker.exists()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"(S'touch %s'\nios\nsystem\n.", "its pickle uses INST"),
        (b"(cos\nsystem\nS'touch %s'\no.", "refers to os.system"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02ctorch\nSize\n)\x81.", "NEWOBJ"),
        (b"\x80\x02ctorch.storage\n_load_from_bytes\n.", "torch.storage._load_from_bytes"),
        (
            b"\x80\x02ctorch\nFloatStorage\n)R.",
            "is damaged or cut short .TypeError: .*not callable",
        ),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "in place of a dict"),
        (b"\x80\x02]K\x01b.", "in place of a dict"),
        (b"\x80\x02K\x01)R.", "is damaged or cut short .TypeError: .*not callable"),
    ],
)
def test_other_ways_to_run_code_are_refused(tmp_path, pickled, message):
    marker = tmp_path / "ran"
    pickled = pickled.replace(b"%s", str(marker).encode())
    with pytest.raises(ValueError, match=message):
        read(tmp_path, make.torch_zip(pickled, {}))
    assert not marker.exists()


def test_views_beyond_their_storage_are_refused(tmp_path):
    raw = {"0": (4, np.arange(4, dtype=np.float32).tobytes())}
    for offset, size, stride in ((0, (5,), (1,)), (2, (2, 2), (1, 2)), (-1, (1,), (1,))):
        stored = make.storage("Float", "0", 4)
        pickled = make.state_dict({"x": make.tensor(stored, offset, size, stride)})
        with pytest.raises(ValueError, match="damaged or cut short"):
            read(tmp_path, make.torch_zip(pickled, raw))
    # A storage that claims more values than the file has.
    pickled = make.state_dict({"x": make.tensor(make.storage("Float", "0", 9), 0, (9,), (1,))})
    with pytest.raises(ValueError, match="storage 0 has 4 values, not 9"):
        read(tmp_path, make.torch_zip(pickled, raw))


BASE = b"\x80\x02"


def _doubled(levels):
    """A tuple that holds the tuple before it twice, and so on: 2^levels steps to walk it."""
    return b"K\x01q\x00" + b"0h\x00h\x00\x86q\x00" * levels


def _nested(levels):
    return b")" + b"\x85" * levels


NONE = b"N"
USES = {
    "key of SETITEM": lambda deep: b"}" + deep + NONE + b"s.",
    "key of SETITEMS": lambda deep: b"}(" + deep + NONE + b"u.",
    "key of DICT": lambda deep: b"(" + deep + NONE + b"d.",
    "key of OrderedDict": lambda deep: b"ccollections\nOrderedDict\n](](" + deep + b"Nee\x85R.",
    "name of a global": lambda deep: deep + b"X\x01\x00\x00\x00a\x93.",
    "module of a global": lambda deep: b"X\x01\x00\x00\x00a" + deep + b"\x93.",
    "size of a tensor": lambda deep: (
        make.REBUILD + b"(" + make.storage("Float", "0", 4) + b"K\x00" + deep + b"\x85"
        b"K\x01\x85" + b"\x89" + make.DICT + b"tR."
    ),
    "offset of a tensor": lambda deep: (
        make.REBUILD + b"(" + make.storage("Float", "0", 4) + deep + b"K\x01\x85"
        b"K\x01\x85" + b"\x89" + make.DICT + b"tR."
    ),
}


def _in_place_of_plain_values():
    yield make.torch_zip(BASE + USES["key of SETITEM"](_nested(200_000)), {})
    for use_fn in USES.values():
        yield make.torch_zip(BASE + use_fn(_doubled(60)), {"0": (4, b"\0" * 16)})
    data = make.torch_legacy(make.state_dict({}), {})
    assert data.endswith(b"](e.")  # the list of storages, which is empty here
    yield data[:-2] + _doubled(60) + b"e."


def test_nested_values_in_place_of_plain_ones_are_one_line_at_once(tmp_path):
    """In a process of its own: what could go wrong is a crash, or does not end."""
    assert len(BASE + USES["key of SETITEM"](_doubled(60))) < 500
    paths = []
    for i, data in enumerate(_in_place_of_plain_values()):
        paths.append(tmp_path / f"{i}.pth")
        paths[-1].write_bytes(data)
    code = (
        "import resource, sys\n"
        "from dmljax.weights import readers\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))\n"
        "for path in sys.argv[1:]:\n"
        "    try: readers.read(path)\n"
        "    except ValueError as error: print(error)"
    )
    lines = python(code, *paths).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(map(str, paths)) and len(paths) == 10
    assert all("is not plain weights" in x or "damaged or cut short" in x for x in lines)


def test_states_of_optimizers_may_be_in_a_checkpoint(tmp_path):
    """Their keys are numbers; PyTorch 1.4 and older took addresses."""
    x = make.tensor(make.storage("Float", "0", 2), 0, (2,), (1,))
    optimizer = b"}(K\x00K\x05\x8a\x06" + (120 << 40).to_bytes(6, "little") + b"K\x06u"
    pickled = BASE + b"}(" + make.text("model") + make.state_dict({"x": x})[2:-1]
    pickled += make.text("optimizer") + optimizer + b"u."
    values = np.arange(2, dtype=np.float32)
    result = read(tmp_path, make.torch_zip(pickled, {"0": (2, values.tobytes())}))
    np.testing.assert_array_equal(result.tensors["x"], values)


def test_one_list_is_not_copied_many_times(tmp_path):
    """180 kB: 5,000 pairs, and 5,000 dicts of them, would need 2 GB."""
    pairs = b"](" + b"".join(b"](X\x04\0\0\0%04xNe" % i for i in range(5_000)) + b"e"
    copies = b"](" + b"ccollections\nOrderedDict\nh\x00\x85R" * 5_000 + b"e."
    pickled = BASE + pairs + b"q\x000" + copies
    with pytest.raises(ValueError, match="holds a list, not a state dict"):
        read(tmp_path, make.torch_zip(pickled, {}))
