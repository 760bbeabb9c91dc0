"""Files of weights written byte by byte, without torch and protobuf."""

import io
import struct
import zipfile

import numpy as np

from dmljax.weights import readers

STORAGES = {"f8": "Double", "f4": "Float", "f2": "Half", "i8": "Long", "i4": "Int", "i1": "Char"}
STORAGES |= {"i2": "Short", "u1": "Byte", "b1": "Bool"}
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
DICT = b"ccollections\nOrderedDict\n)R"


def read(tmp_path, data, name="file.pth"):
    """What the package reads from a file with these bytes."""
    (tmp_path / name).write_bytes(data)
    return readers.read(tmp_path / name)


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value):
    return b"J" + struct.pack("<i", value)


def numbers(values):
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(kind, key, length, view=b""):
    return (
        b"("
        + text("storage")
        + b"ctorch\n%sStorage\n" % kind.encode()
        + text(key)
        + text("cpu")
        + number(length)
        + view
        + b"tQ"
    )


def tensor(stored, offset, size, stride):
    return (
        REBUILD
        + b"("
        + stored
        + number(offset)
        + numbers(size)
        + numbers(stride)
        + (b"\x89" + DICT + b"tR")
    )


def state_dict(entries):
    """Pickle of {name: value}, of values that are pickled already."""
    items = b"".join(text(name) + value for name, value in entries.items())
    return b"\x80\x02" + DICT + b"(" + items + b"u."


def plain(tensors, legacy):
    """The pickle of a state dict of arrays, one storage each, and the storages."""
    entries, raw = {}, {}
    for i, (name, array) in enumerate(tensors.items()):
        strides = [s // array.itemsize for s in np.empty(array.shape, array.dtype).strides]
        kind = "BFloat16" if array.dtype.name == "bfloat16" else STORAGES[array.dtype.str[1:]]
        stored = storage(kind, str(i), array.size, b"N" if legacy else b"")
        entries[name] = tensor(stored, 0, array.shape, strides)
        raw[str(i)] = (array.size, array.tobytes())
    return state_dict(entries), raw


def torch_zip(pickled, raw, *, root="archive", method=zipfile.ZIP_STORED, extra=()):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(f"{root}/data.pkl", pickled)
        for key, (_, data) in raw.items():
            archive.writestr(f"{root}/data/{key}", data)
        for name, data in extra:
            archive.writestr(f"{root}/{name}", data)
    return file.getvalue()


def torch_legacy(pickled, raw, *, big=False):
    magic = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
    system = b"\x80\x02}" + text("little_endian") + (b"\x89" if big else b"\x88") + b"s."
    keys = b"\x80\x02](" + b"".join(map(text, raw)) + b"e."
    head = b"\x80\x02\x8a\x0a" + magic + b"." + b"\x80\x02" + number(1001) + b"."
    order = ">q" if big else "<q"
    body = b"".join(struct.pack(order, n) + data for n, data in raw.values())
    return head + system + pickled + keys + body


def torch_file(tensors, *, legacy):
    write = torch_legacy if legacy else torch_zip
    return write(*plain(tensors, legacy))


def varint(value):
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(key, value):
    """A field of bytes, text or one integer."""
    if isinstance(value, int):
        return varint(key << 3) + varint(value & (1 << 64) - 1)
    data = value.encode() if isinstance(value, str) else value
    return varint(key << 3 | 2) + varint(len(data)) + data


def caffe(blobs, *, old):
    """{layer: [arrays]} as a NetParameter, with layers and shapes as of 2014 (`old`) or later."""
    out = field(1, "GoogleNet")
    for name, arrays in blobs.items():
        layer = field(4 if old else 1, name)
        for array in arrays:
            if old:
                shape = (1,) * (4 - array.ndim) + array.shape
                dims = b"".join(field(i, n) for i, n in enumerate(shape, 1))
            else:
                dims = field(7, field(1, b"".join(map(varint, array.shape))))
            layer += field(6 if old else 7, dims + field(5, array.astype("<f4").tobytes()))
        out += field(2 if old else 100, layer)
    return out


def onnx(tensors, *, kind=1):
    """{name: array} as the initializers of a ModelProto, as raw bytes."""
    graph = field(2, "googlenet")
    for name, array in tensors.items():
        code = 7 if array.dtype == np.int64 else kind
        dims = b"".join(field(1, n) for n in array.shape)
        graph += field(5, dims + field(2, code) + field(8, name) + field(9, array.tobytes()))
    return field(1, 3) + field(2, "maker") + field(7, graph)
