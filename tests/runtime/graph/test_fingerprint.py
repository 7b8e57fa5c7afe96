"""The content hash: stable, sensitive, and cheap on huge files."""

from pathlib import Path

from gnnplan.runtime.graph.format import BLOCK_BYTES, BLOCKS, block_offsets, fingerprint_files


def test_order_does_not_matter_but_names_sizes_content_and_facts_do(tmp_path: Path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"one")
    b.write_bytes(b"two")
    base = fingerprint_files([a, b])
    assert base == fingerprint_files([b, a])
    assert len(base) == 32
    others = [fingerprint_files([a]), fingerprint_files([a, b], facts="x")]
    b.write_bytes(b"twp")
    others.append(fingerprint_files([a, b]))
    b.write_bytes(b"two\0")
    others.append(fingerprint_files([a, b]))
    b.write_bytes(b"two")
    b.rename(tmp_path / "c")
    others.append(fingerprint_files([a, tmp_path / "c"]))
    assert len({base, *others}) == 6


def test_small_files_are_hashed_whole_and_large_ones_from_end_to_end():
    small = block_offsets(3 * BLOCK_BYTES + 1)
    assert small == [0, BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES]
    assert block_offsets(0) == []
    large = block_offsets(10**12)
    assert len(large) == BLOCKS
    assert (large[0], large[-1]) == (0, 10**12 - BLOCK_BYTES)


def test_a_huge_file_costs_only_its_blocks(tmp_path: Path):
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would take minutes
    assert fingerprint_files([tmp_path / "huge"])
