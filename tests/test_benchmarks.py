"""The pure parts of the benchmarks."""

from benchmarks.report import without_folder
from benchmarks.servers import memory_of

SMAPS = """\
7f0000000000-7f0000400000 r--s 00000000 fe:01 42                         /home/u/.cache/relay/packs-v1/smollm2.pack
Size:               4096 kB
Rss:                2000 kB
Pss:                1000 kB
7f0000400000-7f0000800000 rw-p 00000000 00:00 0
Rss:                 500 kB
Pss:                 500 kB
7f0000800000-7f0000900000 r-xp 00000000 fe:01 7                          /usr/lib/libc.so.6
Rss:                 300 kB
Pss:                  30 kB
55d000000000-55d000021000 rw-p 00000000 00:00 0                          [heap]
Rss:                  20 kB
Pss:                  20 kB
"""


def test_memory_of_a_process_by_kind() -> None:
    memory = {name: round(value * 1e6) for name, value in memory_of(SMAPS).items()}
    assert memory == {
        "total": 1550 * 1024,
        "weights": 1000 * 1024,
        "weights_rss": 2000 * 1024,
        "anonymous": 520 * 1024,
    }


def test_a_deleted_weight_file_still_counts_as_weights() -> None:
    text = "7f00-7f01 r--s 00000000 fe:01 42 /tmp/with a space/model.safetensors (deleted)\nRss: 8 kB\nPss: 4 kB\n"
    assert memory_of(text)["weights"] == 4 * 1024 / 1e6


def test_a_result_names_files_and_no_folders_of_its_machine() -> None:
    given = ["--out", "/home/u/out/kv.json", "benchmarks/results/kv.json", "/dev/shm/8b.pack", "org/name"]
    kept = ["--out", "kv.json", "benchmarks/results/kv.json", "/dev/shm/8b.pack", "org/name"]
    assert [without_folder(argument) for argument in given] == kept
