"""No code in a pickle is executed."""

import os
import pickle

import numpy as np
import pytest
import weight_files as make
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
        (b"(S'touch %s'\nios\nsystem\n.", "INST os system"),
        (b"(cos\nsystem\nS'touch %s'\no.", "refers to os.system"),
        (b"\x80\x02\x82\x01.", "EXT1"),
        (b"\x80\x02ctorch\nSize\n)\x81.", "NEWOBJ"),
        (b"\x80\x02ctorch.storage\n_load_from_bytes\n.", "torch.storage._load_from_bytes"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "torch.FloatStorage is called"),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "in place of a dict"),
        (b"\x80\x02]K\x01b.", "in place of a dict"),
        (b"\x80\x02K\x01)R.", "in place of a _Global"),
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
