import struct

import gguf
import numpy as np
import pytest
from weight_files import (
    F,
    M,
    V,
    finish,
    gguf_name,
    gguf_writer,
    interleave,
    num_elements,
    plain_param,
    tiny_specs,
    tiny_tensors,
    write_gguf,
)

from jaxllm.weights.gguf import SUPPORTED_TYPES, GgufFile, GgufReader
from jaxllm.weights.load import load_params
from jaxllm.weights.source import resolve_model


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


# A block of each type in which all numbers are equal, and that number, worked out by hand from the layout of the block.
BLOCKS = {
    "F32": (np.float32(1.5).tobytes(), 1.5),
    "F16": (half(1.5), 1.5),
    "BF16": (b"\xc0\x3f", 1.5),
    # scale d, then 32 signed bytes q: d*q = 0.5*3
    "Q8_0": (half(0.5) + bytes([3] * 32), 1.5),
    # d, nibbles q: d*(q-8) = 0.5*(11-8)
    "Q4_0": (half(0.5) + b"\xbb" * 16, 1.5),
    # d, m, nibbles: d*q+m = 0.5*3+1
    "Q4_1": (half(0.5) + half(1) + b"\x33" * 16, 2.5),
    # d, 32 high bits, nibbles: d*(16*1+3-16)
    "Q5_0": (half(0.5) + b"\xff" * 4 + b"\x33" * 16, 1.5),
    # d, m, high bits, nibbles: 0.5*(16+3)+1
    "Q5_1": (half(0.5) + half(1) + b"\xff" * 4 + b"\x33" * 16, 10.5),
    # 16 bytes of min and scale nibbles, 2-bit q, d, dmin: 0.5*3*1 - 0.25*2
    "Q2_K": (b"\x23" * 16 + b"\x55" * 64 + half(0.5) + half(0.25), 1.0),
    # third bits (set: no -4), 2-bit q, 6-bit scales (low nibbles 1, high bits 2: 33-32), d: 0.5*1*1
    "Q3_K": (b"\xff" * 32 + b"\x55" * 64 + b"\x11" * 8 + b"\xaa" * 4 + half(0.5), 0.5),
    # d, dmin, 6-bit scales 3 and mins 2 (packed), nibbles: 0.5*3*5 - 0.25*2
    "Q4_K": (half(0.5) + half(0.25) + b"\x03" * 4 + b"\x02" * 4 + b"\x23" * 4 + b"\x55" * 128, 7.0),
    # the same with a fifth bit: 0.5*3*(16+5) - 0.5
    "Q5_K": (half(0.5) + half(0.25) + b"\x03" * 4 + b"\x02" * 4 + b"\x23" * 4 + b"\xff" * 32 + b"\x55" * 128, 31.0),
    # low nibbles, 2 high bits, signed scales, d: 0.5*2*(2*16+3-32)
    "Q6_K": (b"\x33" * 128 + b"\xaa" * 64 + bytes([2] * 16) + half(0.5), 3.0),
}


def read(reader, name, index, dtype=np.float32):
    shape = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, reader.shapes[name], strict=True))
    out = np.full(shape, np.nan, dtype)
    reader.read(name, index, out)
    return out


def write_one(path, quant, data):
    """A file with a token embedding of raw bytes."""
    kind = gguf.GGMLQuantizationType[quant]
    writer = gguf_writer(path)
    if quant in ("F32", "F16"):
        writer.add_tensor("token_embd.weight", data.view(np.float32 if quant == "F32" else np.float16))
    else:
        writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    finish(writer)
    return GgufReader(GgufFile(path))


def test_every_supported_type_has_a_block_here():
    assert sorted(BLOCKS) == sorted(SUPPORTED_TYPES)


@pytest.mark.parametrize("quant", SUPPORTED_TYPES)
def test_block_by_hand(tmp_path, quant):
    block, value = BLOCKS[quant]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]]
    assert len(block) == block_bytes
    data = np.tile(np.frombuffer(block, np.uint8), (3, 512 // block_len))
    reader = write_one(tmp_path / "m.gguf", quant, data)
    assert reader.shapes == {"model.embed_tokens.weight": (3, 512)}
    assert (read(reader, "model.embed_tokens.weight", np.s_[:, :]) == value).all()


@pytest.mark.parametrize("quant", SUPPORTED_TYPES)
def test_slices(tmp_path, quant):
    """Blocks of random bits, whose numbers all differ; the gguf package decodes the whole, the reader any slice of it."""
    kind = gguf.GGMLQuantizationType[quant]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (6, 768 // block_len * block_bytes), np.uint8)
    if quant in ("F32", "F16", "BF16"):
        data = gguf.quantize(rng.standard_normal((6, 768), np.float32), kind).view(np.uint8)
    else:
        # Scales of a size that float16 has.
        halves = data.reshape(6, -1, block_bytes)
        for at in {"Q2_K": (-4, -2), "Q3_K": (-2,), "Q6_K": (-2,), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(quant, (0, 2)):
            if at == 2 and quant in ("Q8_0", "Q4_0", "Q5_0"):
                continue
            halves[:, :, at % block_bytes : at % block_bytes + 2] = np.frombuffer(half(0.01), np.uint8)
    whole = gguf.dequantize(data, kind).reshape(6, 768)
    assert np.unique(whole).size > 10
    reader = write_one(tmp_path / "m.gguf", quant, data)
    for index in (np.s_[:, :], np.s_[2:5, :], np.s_[:, 256:512], np.s_[1:4, 100:700], np.s_[5:6, 767:768], np.s_[0:6, 31:33]):
        np.testing.assert_array_equal(read(reader, "model.embed_tokens.weight", index), whole[index])


@pytest.mark.parametrize("quant", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("num_stripes", [1, 4])
def test_model(tmp_path, quant, num_stripes):
    tensors = tiny_tensors()
    kind = gguf.GGMLQuantizationType[quant]
    rounded = {
        name: values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, kind), kind)
        for name, values in tensors.items()
    }
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", tensors, quant)))
    params = load_params(source, tiny_specs("float32", num_stripes))
    for spec in tiny_specs("float32", num_stripes):
        np.testing.assert_array_equal(np.asarray(params[spec.path]), plain_param(spec, rounded), err_msg=spec.path)


def test_rotary_order_by_hand(tmp_path):
    # Two heads of four rows: the file has the rows of the first half of a head at its even places.
    rows = np.arange(8, dtype=np.float32)
    assert interleave(rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    writer = gguf_writer(tmp_path / "m.gguf", attention__head_count=2, attention__head_count_kv=1)
    matrix = np.repeat(rows[:, None], 32, axis=1)
    writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", matrix)
    writer.add_tensor("blk.0.attn_k.weight", matrix[:4])
    writer.add_tensor("blk.0.attn_v.weight", matrix[:4])
    finish(writer)
    reader = GgufReader(GgufFile(tmp_path / "m.gguf"))
    q = read(reader, "model.layers.0.self_attn.q_proj.weight", np.s_[:, :])
    assert q[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert read(reader, "model.layers.0.self_attn.q_proj.weight", np.s_[3:6, 0:1])[:, 0].tolist() == [3, 4, 6]
    assert read(reader, "model.layers.0.self_attn.k_proj.weight", np.s_[:, 1:3])[:, 0].tolist() == [0, 2, 1, 3]
    assert read(reader, "model.layers.0.self_attn.v_proj.weight", np.s_[:, :])[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_other_architectures_are_not_interleaved(tmp_path, arch):
    tensors = tiny_tensors()
    reader = GgufReader(GgufFile(write_gguf(tmp_path / "m.gguf", tensors, arch=arch)))
    assert set(reader.shapes) == set(tensors)
    for name, values in tensors.items():
        index = tuple(slice(None) for _ in values.shape)
        np.testing.assert_array_equal(read(reader, name, index), values)


def test_header_agrees_with_the_gguf_package(tmp_path):
    tokens = ["a", "é", "", "🎉"]
    writer = gguf_writer(
        tmp_path / "m.gguf",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=[0.5, -1.0, 2.25, 0.0],
        tokenizer__ggml__token_type=[1, 2, 3, 4],
        tokenizer__ggml__add_bos_token=True,
        general__name="tiny",
    )
    writer.add_float64("x.f64", 0.1)
    writer.add_int8("x.i8", -3)
    writer.add_uint64("x.u64", 2**40)
    for name, values in tiny_tensors().items():
        writer.add_tensor(gguf_name(name), values)
    finish(writer)
    ours, theirs = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert dict(ours.metadata) == expected
    assert ours.metadata["tokenizer.ggml.tokens"] == tokens
    assert len(ours.metadata) == len(expected)
    assert {name: (info.shape, info.type_id, info.start) for name, info in ours.tensors.items()} == {
        tensor.name: (tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type, tensor.data_offset)
        for tensor in theirs.tensors
    }


class TestRefused:
    @pytest.mark.parametrize("quant", ["IQ4_NL", "TQ1_0", "Q8_1", "I32"])
    def test_type(self, tmp_path, quant):
        kind = gguf.GGMLQuantizationType[quant]
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        writer = gguf_writer(tmp_path / "m.gguf")
        data = np.zeros((2, 256 // block_len * block_bytes), np.uint8)
        writer.add_tensor("token_embd.weight", data.view(np.int32) if quant == "I32" else data, raw_dtype=kind)
        finish(writer)
        with pytest.raises(ValueError, match=f"tensor token_embd.weight is {quant}, which is not supported; supported: F32"):
            GgufReader(GgufFile(tmp_path / "m.gguf"))

    def test_unknown_type(self, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", {"model.embed_tokens.weight": np.ones((2, 32), np.float32)})
        entry = b"token_embd.weight" + struct.pack("<IQQI", 2, 32, 2, 0)
        data = path.read_bytes()
        assert data.count(entry) == 1
        path.write_bytes(data.replace(entry, entry[:-4] + struct.pack("<I", 999)))
        with pytest.raises(ValueError, match=r"tensor token_embd\.weight has the unknown ggml type 999"):
            GgufReader(GgufFile(path))

    @pytest.mark.parametrize(
        "name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_sinks.weight", "cls.weight", "rope_factors_long.weight"]
    )
    def test_tensor_without_a_place(self, tmp_path, name):
        writer = gguf_writer(tmp_path / "m.gguf")
        writer.add_tensor(name, np.ones((2, 32), np.float32))
        finish(writer)
        with pytest.raises(ValueError, match=f"tensor {name} has no place in architecture 'llama'"):
            GgufReader(GgufFile(tmp_path / "m.gguf"))

    def test_architecture(self, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", {"model.embed_tokens.weight": np.ones((2, 32), np.float32)}, arch="mamba")
        with pytest.raises(
            ValueError, match=r"m\.gguf: GGUF architecture 'mamba' is not supported; supported: llama, qwen2, qwen3"
        ):
            resolve_model(str(path))

    def test_part_of_a_split_model(self, tmp_path):
        path = write_gguf(tmp_path / "m.gguf", {"model.embed_tokens.weight": np.ones((2, 32), np.float32)}, split__count=3)
        with pytest.raises(ValueError, match="a part of a model split over 3 files"):
            resolve_model(str(path))

    def test_other_files(self, tmp_path):
        path = tmp_path / "m.gguf"
        path.write_bytes(b"GGML" + bytes(100))
        with pytest.raises(ValueError, match=r"m\.gguf: not a GGUF file"):
            GgufFile(path)
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
        with pytest.raises(ValueError, match="GGUF version 1 is not supported"):
            GgufFile(path)
        path.write_bytes(b"")
        with pytest.raises(ValueError, match=r"m\.gguf: cannot be read"):
            GgufFile(path)

    def test_given_twice(self, tmp_path):
        writer = gguf_writer(tmp_path / "m.gguf")
        writer.add_tensor("token_embd.weight", np.ones((2, 32), np.float32))
        writer.add_tensor("token_embd.wxyzht", np.ones((2, 32), np.float32))
        finish(writer)
        path = tmp_path / "m.gguf"
        path.write_bytes(path.read_bytes().replace(b"token_embd.wxyzht", b"token_embd.weight"))
        with pytest.raises(ValueError, match=r"tensor token_embd\.weight is given twice"):
            GgufFile(path)


def test_truncated_anywhere(tmp_path):
    """However short the file, it is refused by name, and never read beyond its end."""
    path = write_gguf(tmp_path / "m.gguf", tiny_tensors(), tokenizer__ggml__tokens=["a", "b"], tokenizer__ggml__scores=[1.0, 2.0])
    data = path.read_bytes()
    tensor_bytes = 4 * num_elements(tiny_tensors())
    header = len(data) - tensor_bytes
    assert 1000 < header < 2500
    for size in [*range(4, header, 7), header, header + 100, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"m\.gguf: .*(truncated|not a GGUF)"):
            GgufReader(GgufFile(path))
    path.write_bytes(data)
    assert GgufReader(GgufFile(path)).shapes["model.embed_tokens.weight"] == (V, M)
    assert GgufReader(GgufFile(path)).shapes["model.layers.0.mlp.down_proj.weight"] == (M, F)
