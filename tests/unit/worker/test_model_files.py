"""Files by content hash, and nothing else."""

import hashlib

from penstock.core.types.instances import CardFile
from penstock.worker.files import ModelFiles


def test_only_what_the_card_lists_and_only_unchanged(tmp_path):
    content = b'{"a": 1}'
    sha256 = hashlib.sha256(content).hexdigest()
    path = tmp_path / "config.json"
    path.write_bytes(content)
    (tmp_path / "secret.txt").write_bytes(b"secret")
    given = hashlib.sha256(b"given").hexdigest()
    listed = [
        CardFile(name="config.json", sha256=sha256, size_bytes=8),
        CardFile(name="absent", sha256=given, size_bytes=5),
    ]
    files = ModelFiles(tmp_path, listed, [b"given", b"secret"])
    assert files.read(given) == b"given"
    assert files.read(sha256) == content
    assert files.read(hashlib.sha256(b"secret").hexdigest()) is None
    assert files.read("../secret.txt") is None
    path.write_bytes(b"{}")
    assert files.read(sha256) is None
    path.unlink()
    assert files.read(sha256) is None
