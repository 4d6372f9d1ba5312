from support.builders import Run, flip_bit
from support.forge import Forge
from support.other_user import another_user, directory_for_all
from support.sweeps import mostly_slow


@mostly_slow()
def test_what_is_whole_is_good(recckpt, url):
    Run(url, max_keep=2).train(20)
    for args in ((url,), (url, "--quick"), (f"{url}/ckpt_10",)):
        answer = recckpt("verify", *args)
        assert (answer.code, answer.err) == (0, "")
        assert {line[-1] for line in answer.lines[1:]} == {"good"}
    assert [line[0] for line in recckpt("verify", url).lines[1:]] == ["ckpt_10", "ckpt_20"]


def test_all_problems_are_printed_and_counted(recckpt, tmp_path):
    Run(tmp_path, max_keep=3).train(30)
    flip_bit(tmp_path / "ckpt_10" / "extra.pt")
    forge = Forge(tmp_path / "ckpt_20")
    flip_bit(forge.path(forge.parts[0]))
    forge.path("model.pt").unlink()
    answer = recckpt("verify", tmp_path)
    assert answer.code == 1
    assert answer.err == f"recckpt: {tmp_path}: found 3 problems in 2 of 3 checkpoints\n"
    assert [line[-2:] for line in answer.lines[1:4]] == [["1", "problem"], ["2", "problems"], answer.lines[3][-2:]]
    assert answer.lines[3][-1] == "good"
    for file in ("ckpt_10/extra.pt", f"ckpt_20/{forge.parts[0]}", "ckpt_20/model.pt"):
        assert sum(line[:1] == [file] or line[:1] == [f"{file}:"] for line in answer.lines) == 1


def test_a_damaged_claim_is_counted_beside_the_checkpoints(recckpt, tmp_path):
    Run(tmp_path).train(10)
    flip_bit(tmp_path / ".recckpt/owner/1.list.json")
    answer = recckpt("verify", tmp_path)
    assert answer.err == f"recckpt: {tmp_path}: found 1 problem in 0 of 1 checkpoint and in .recckpt/owner\n"
    assert answer.lines[2][0] == ".recckpt/owner"


def test_json_has_each_problem_in_its_parts(recckpt, tmp_path):
    Run(tmp_path).train(10)
    (tmp_path / "ckpt_10" / "extra.pt").unlink()
    answer = recckpt("verify", tmp_path, "--quick", "--json")
    assert answer.code == 1
    assert answer.json["deep"] is False
    (checkpoint,) = answer.json["checkpoints"]
    assert (checkpoint["id"], checkpoint["good"]) == ("ckpt_10", False)
    (problem,) = checkpoint["problems"]
    assert (problem["file"], problem["found"]) == ("ckpt_10/extra.pt", "no such file")
    assert problem["expected"].endswith("bytes")


def test_deep_is_the_default_and_excludes_quick_which_takes_the_bytes_on_trust(recckpt, tmp_path):
    Run(tmp_path).train(10)
    flip_bit(tmp_path / "ckpt_10" / "extra.pt")
    answer = recckpt("verify", tmp_path)
    assert answer.code == 1
    assert recckpt("verify", tmp_path, "--deep", "--threads", 2) == answer
    assert recckpt("verify", tmp_path, "--deep", "--json").json["deep"] is True
    assert recckpt("verify", tmp_path, "--quick").code == 0
    for wrong in (("--deep", "--quick"), ("--threads", 0)):
        assert recckpt("verify", tmp_path, *wrong).code == 2


def test_a_manifest_that_cannot_be_read_is_a_problem(recckpt, tmp_path):
    Run(tmp_path, max_keep=2).train(20)
    (tmp_path / "ckpt_20" / "manifest.json").write_bytes(b"\xff\n")
    answer = recckpt("verify", tmp_path)
    assert answer.code == 1
    assert answer.lines[1][-1] == "good"
    assert answer.lines[2] == ["ckpt_20", "-", "-", "-", "1", "problem"]
    assert recckpt("verify", tmp_path / "ckpt_20").code == 1


def test_one_checkpoint_that_cannot_be_read_does_not_end_the_look_at_the_others(recckpt, tmp_path):
    with directory_for_all() as runs:
        Run(runs, max_keep=3).train(30)
        (runs / "ckpt_10" / "manifest.json").chmod(0)
        (runs / "ckpt_20").chmod(0)
        with another_user():
            verified, listed = recckpt("verify", runs, "--json"), recckpt("ls", runs, "--json")
            shown = recckpt("ls", runs)
    assert (verified.code, listed.code, shown.code) == (1, 1, 1)
    good = {report["directory"]: report["good"] for report in verified.json["checkpoints"]}
    assert good == {"ckpt_10": False, "ckpt_20": False, "ckpt_30": True}
    assert "Permission denied" in str(verified.json)
    assert [checkpoint["id"] for checkpoint in listed.json["checkpoints"]] == ["ckpt_30"]
    assert [item["directory"] for item in listed.json["unreadable"]] == ["ckpt_10", "ckpt_20"]
    assert "2 of 3 checkpoints damaged or unreadable" in shown.err
