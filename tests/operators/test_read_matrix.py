import gzip

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sparse
import torch

from ritz.operators import read_matrix

LINE = sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(6, 6)).tocsr()


@pytest.mark.parametrize("name", ["a.mtx", "a.mtx.gz", "a.npz", "a.npy"])
def test_a_saved_matrix_is_read_back(name, tmp_path):
    path = tmp_path / name
    if name == "a.npz":
        sparse.save_npz(path, LINE)
    elif name == "a.npy":
        np.save(path, LINE.toarray())
    else:
        scipy.io.mmwrite(tmp_path / "a.mtx", LINE)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress((tmp_path / "a.mtx").read_bytes(), mtime=0))
    torch.testing.assert_close(read_matrix(path).dense(), torch.from_numpy(LINE.toarray()))


def test_a_dense_matrix_market_file_is_read(tmp_path):
    scipy.io.mmwrite(tmp_path / "a.mtx", LINE.toarray())
    torch.testing.assert_close(
        read_matrix(tmp_path / "a.mtx").dense(), torch.from_numpy(LINE.toarray())
    )


def test_files_without_a_symmetric_matrix_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no matrix file .*a\.mtx"):
        read_matrix(tmp_path / "a.mtx")
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(ValueError, match=r"must end in one of \.mtx"):
        read_matrix(tmp_path / "a.txt")
    (tmp_path / "bad.mtx").write_text("%%MatrixMarket matrix coordinate real general\n2 2 9\n1 1")
    with pytest.raises(ValueError, match="must contain a symmetric matrix"):
        read_matrix(tmp_path / "bad.mtx")
    np.save(tmp_path / "asymmetric.npy", np.triu(np.ones((3, 3))))
    with pytest.raises(ValueError, match=r"must contain a symmetric matrix saved by numpy\.save"):
        read_matrix(tmp_path / "asymmetric.npy")
    np.savez(tmp_path / "objects.npz", a=np.array([{"run": "me"}], dtype=object))
    with pytest.raises(ValueError, match="saved by scipy"):
        read_matrix(tmp_path / "objects.npz")
    (tmp_path / "torn.npz").write_bytes(b"PK not a file")
    with pytest.raises(ValueError, match="saved by scipy"):
        read_matrix(tmp_path / "torn.npz")
    np.save(tmp_path / "pickled.npy", np.array([{"run": "me"}], dtype=object))
    np.save(tmp_path / "vector.npy", np.ones(4))
    for name in ("pickled.npy", "vector.npy"):
        with pytest.raises(ValueError, match="saved by numpy"):
            read_matrix(tmp_path / name)
    sparse.save_npz(tmp_path / "complex.npz", LINE * 1j)
    with pytest.raises(ValueError, match="real numbers"):
        read_matrix(tmp_path / "complex.npz")
    scipy.io.mmwrite(tmp_path / "general.mtx", sparse.csr_array([[1.0, 2.0], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="symmetric"):
        read_matrix(tmp_path / "general.mtx")


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_a_damaged_compressed_file_raises(damage, tmp_path):
    scipy.io.mmwrite(tmp_path / "a.mtx", LINE)
    whole = bytearray(gzip.compress((tmp_path / "a.mtx").read_bytes(), mtime=0))
    whole[40] ^= 0xFF if damage == "flipped" else 0
    torn = {"cut": whole[:60], "plain": b"no gzip"}.get(damage, whole)
    (tmp_path / "a.mtx.gz").write_bytes(torn)
    with pytest.raises(ValueError, match=r"a\.mtx\.gz' must contain"):
        read_matrix(tmp_path / "a.mtx.gz")
    sparse.save_npz(tmp_path / "a.npz", LINE)
    archive = bytearray((tmp_path / "a.npz").read_bytes())
    archive[120:122] = b"\xff\xff"
    (tmp_path / "a.npz").write_bytes(archive)
    with pytest.raises(ValueError, match=r"a\.npz' must contain"):
        read_matrix(tmp_path / "a.npz")


def test_a_header_of_a_matrix_larger_than_memory_raises(tmp_path):
    header = "%%MatrixMarket matrix coordinate real symmetric\n99999999999999 99999999999999 1\n"
    (tmp_path / "a.mtx").write_text(header + "1 1 2.0\n")
    with pytest.raises(ValueError, match="must contain a symmetric matrix"):
        read_matrix(tmp_path / "a.mtx")
