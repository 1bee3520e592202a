import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from weight_files import tiny_tensors, write_safetensors

from jaxllm.weights.safetensors import SafetensorsReader


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_read(tmp_path, num_files, dtype):
    tensors = tiny_tensors(dtype) | {"odd": np.arange(3, dtype=np.float16)}
    reader = SafetensorsReader(write_safetensors(tmp_path, tensors, num_files=num_files))
    assert reader.shapes == {name: values.shape for name, values in tensors.items()}
    for name, values in tensors.items():
        assert reader.dtypes[name] == values.dtype.name
        index = tuple(slice(size // 3, size) for size in values.shape)
        out = np.zeros(values[index].shape, np.float64)
        reader.read(name, index, out)
        np.testing.assert_array_equal(out, values[index].astype(np.float64))
    assert reader.where("odd").startswith(str(tmp_path))


def test_other_types_are_named(tmp_path):
    tensors = {"i": np.arange(4), "f8": np.ones(4, ml_dtypes.float8_e4m3fn)}
    reader = SafetensorsReader(write_safetensors(tmp_path, tensors))
    assert reader.dtypes == {"i": "I64", "f8": "F8_E4M3"}


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_truncated(tmp_path, size):
    path = write_safetensors(tmp_path, tiny_tensors()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        SafetensorsReader(tmp_path)


def test_corrupt(tmp_path):
    path = write_safetensors(tmp_path, tiny_tensors()) / "model.safetensors"
    path.write_bytes(b"\xff" * 1000)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        SafetensorsReader(tmp_path)


def test_given_twice(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "part1.safetensors")
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "part2.safetensors")
    with pytest.raises(ValueError, match=r"tensor a is given twice: in .*part1\.safetensors and in .*part2\.safetensors"):
        SafetensorsReader(tmp_path)


class TestIndex:
    def write(self, folder, change):
        write_safetensors(folder, tiny_tensors(), num_files=2)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
        return folder

    def test_missing_file(self, tmp_path):
        folder = self.write(tmp_path, lambda index: index.update({"model.norm.weight": "model-00009-of-00009.safetensors"}))
        with pytest.raises(ValueError, match=r"index\.json: it names the file 'model-00009-of-00009\.safetensors', which is not"):
            SafetensorsReader(folder)

    def test_file_of_another_folder(self, tmp_path):
        save_file({"x": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
        folder = self.write(tmp_path / "model", lambda index: index.update({"x": "../x.safetensors"}))
        with pytest.raises(ValueError, match=r"it names the file '\.\./x\.safetensors', which is not in the folder"):
            SafetensorsReader(folder)

    def test_missing_tensor(self, tmp_path):
        folder = self.write(tmp_path, lambda index: index.update({"model.extra.weight": index["model.norm.weight"]}))
        with pytest.raises(ValueError, match=r"index\.json: tensor model\.extra\.weight is not in model-0000"):
            SafetensorsReader(folder)

    def test_tensor_of_another_file(self, tmp_path):
        def swap(index):
            files = sorted(set(index.values()))
            index["model.norm.weight"] = files[1 - files.index(index["model.norm.weight"])]

        with pytest.raises(ValueError, match=r"index\.json: tensor model\.norm\.weight is not in .* but in model-0000"):
            SafetensorsReader(self.write(tmp_path, swap))

    def test_tensor_that_is_not_listed(self, tmp_path):
        folder = self.write(tmp_path, lambda index: index.pop("model.norm.weight"))
        with pytest.raises(ValueError, match=r"index\.json: tensor model\.norm\.weight of .* is not in the index"):
            SafetensorsReader(folder)

    def test_given_twice(self, tmp_path):
        folder = self.write(tmp_path, lambda index: None)
        for path in sorted(folder.glob("model-*.safetensors")):
            save_file({"a": np.ones(2, np.float32)}, path)
        with pytest.raises(ValueError, match="tensor a is given twice"):
            SafetensorsReader(folder)

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"])
    def test_broken(self, tmp_path, text):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
            SafetensorsReader(tmp_path)

    def test_beside_a_single_file(self, tmp_path):
        folder = self.write(tmp_path, lambda index: None)
        save_file(tiny_tensors(), folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"holds model\.safetensors and an index that does not name it"):
            SafetensorsReader(folder)
