import json
import signal

import pytest
from support.delta_runs import rows_of, run_with_chain
from support.mirrors import check_whole, ids_of

from recckpt.cli.mirror import keep_policy
from recckpt.policies.keep import All, Best, EveryNth, KeepBytes, KeptByAny, Newest, OnePer, YoungerThan
from recckpt.storage import open_storage


@pytest.fixture
def run(tmp_path):
    return run_with_chain(tmp_path / "run")


@pytest.fixture
def to(tmp_path):
    return tmp_path / "to"


def test_a_pass_says_what_it_copied_and_the_next_that_nothing_is_new(recckpt, run, to):
    answer = recckpt("mirror", run.url, to)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith(f"{to}: copied 3 checkpoints, ")
    assert answer.out.endswith("; the newest is ckpt_3\n")
    again = recckpt("mirror", run.url, to, "--threads", 1)
    assert (again.code, again.out) == (0, f"{to}: nothing is new; the newest is ckpt_3\n")
    check_whole(to)
    assert rows_of(open_storage(str(to)), "ckpt_3") == rows_of(run, "ckpt_3")


def test_as_json(recckpt, run, to):
    values = recckpt("mirror", run.url, to, "--json").json
    assert (values["copied"], values["removed"], values["newest"]) == (["ckpt_1", "ckpt_2", "ckpt_3"], [], "ckpt_3")
    assert (values["output_dir"], values["damaged"]) == (str(to), {})
    assert recckpt("mirror", run.url, to, "--json").json["bytes"] == 0


def test_damage_in_the_run_is_a_problem_and_what_stands_on_it_is_named_each_once(recckpt, run, to, tmp_path, caplog):
    part = next((tmp_path / "run" / "ckpt_2").glob("sparse/*.arrow"))
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    answer = recckpt("mirror", run.url, to)
    assert answer.code == 1
    damaged, above = answer.err.splitlines()
    assert damaged.startswith("recckpt: in the run, ckpt_2 is damaged, and not copied: ckpt_2/sparse/")
    assert above == "recckpt: in the run, ckpt_3 builds on ckpt_2, and is not copied"
    assert caplog.text == ""
    assert answer.out.startswith(f"{to}: copied 1 checkpoint, ")
    assert answer.out.endswith("; the newest is ckpt_1\n")
    assert "removed" not in answer.out
    data = recckpt("mirror", run.url, to, "--json").json
    assert ([*data["damaged"]], data["left_out"], data["removed"]) == (["ckpt_2"], {"ckpt_3": "ckpt_2"}, [])


def test_wrong_usage_is_told_from_a_problem(recckpt, run, to, tmp_path):
    assert recckpt("mirror", run.url, to, "--keep", "few").code == 2
    assert recckpt("mirror", run.url, to, "--interval", 3).code == 2
    assert recckpt("mirror", run.url, run.url).code == 2
    other = run_with_chain(tmp_path / "other")
    assert recckpt("mirror", run.url, f"{other.url}/ckpt_1").code == 2
    assert "this is itself the directory of a checkpoint" in recckpt("mirror", f"{other.url}/ckpt_1", to).err
    assert recckpt("mirror", tmp_path / "nothing", to).code == 1
    assert not to.exists()


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("3", Newest(3)),
        ("all", All()),
        ("every=1000,2", KeptByAny(EveryNth(1000), Newest(2))),
        ("best=auc,least=loss", KeptByAny(Best(1, "auc"), Best(1, "loss", "min"))),
        ("days=0.5", YoungerThan(43_200)),
        ("one-per-days=1", OnePer(86_400)),
        ("bytes=2 TB", KeepBytes("2 TB")),
    ],
)
def test_policies_are_written_in_the_shell(text, policy):
    made = keep_policy(text)
    assert made.keeps == (policy.keeps if isinstance(policy, KeptByAny) else (policy,))


@pytest.mark.parametrize("text", ["", "0", "-1", "every=0", "every=", "best", "3,", "days=x", "newest=3"])
def test_other_policies_are_refused(text):
    with pytest.raises(ValueError, match="expected a number of the newest, all, every="):
        keep_policy(text)


class Followed:
    """A `recckpt mirror --follow` that is interrupted once it has looked so many times."""

    def __init__(self, monkeypatch, steps):
        self.steps, self.n_looks = steps, 0
        monkeypatch.setattr("recckpt.cli.mirror.sleep", self.sleep)

    def sleep(self, seconds):
        step = self.steps[self.n_looks] if self.n_looks < len(self.steps) else None
        self.n_looks += 1
        if step is None:
            raise KeyboardInterrupt
        step()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_mirror_that_follows_with_exit_code_0(recckpt, run, to, monkeypatch, number):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        Followed(monkeypatch, [lambda: signal.raise_signal(number)])
        answer = recckpt("mirror", run.url, to, "--follow")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (answer.code, answer.err) == (0, "")
    assert ids_of(to) == ids_of(run.url)


def test_follow_goes_on_until_it_is_interrupted_and_says_what_changes(recckpt, tmp_path, to, monkeypatch):
    followed = Followed(monkeypatch, [lambda: None, lambda: run_with_chain(tmp_path / "run"), lambda: None])
    answer = recckpt("mirror", tmp_path / "run", to, "--follow", "--json")
    assert answer.code == 0
    assert [json.loads(line)["copied"] for line in answer.out.splitlines()] == [["ckpt_1", "ckpt_2", "ckpt_3"]]
    assert answer.err.splitlines() == [f"recckpt: {tmp_path / 'run'}: does not exist; trying again every 5 s"]
    assert followed.n_looks == 4
    assert ids_of(to) == ["ckpt_1", "ckpt_2", "ckpt_3"]


def test_follow_goes_on_after_an_error_of_the_storage_and_ends_where_somebody_goes_on_from_the_mirror(
    recckpt, run, to, monkeypatch
):
    from recckpt.rewrite.mirroring import Mirror

    def fail(self):
        raise OSError("the network is away")

    def break_it():
        monkeypatch.setattr(Mirror, "update", fail)

    def mend_it(real=Mirror.update):
        monkeypatch.setattr(Mirror, "update", real)

    def go_on_from_it():
        (to / ".recckpt" / "mirror.json").unlink()

    Followed(monkeypatch, [break_it, lambda: None, mend_it, go_on_from_it])
    answer = recckpt("mirror", run.url, to, "--follow", "--interval", 2)
    assert answer.code == 1
    assert answer.err.splitlines()[0] == "recckpt: the network is away; trying again every 2 s"
    assert "found ckpt_1/, which no mirror has written" in answer.err.splitlines()[-1]


def test_follow_goes_on_after_a_pass_of_another_mirror(recckpt, run, to, monkeypatch):
    from recckpt.rewrite.mirroring import Mirror

    real = Mirror.update

    def interrupted(self):
        real(Mirror(run.url, to))
        self._hold.check()

    def come_between():
        monkeypatch.setattr(Mirror, "update", interrupted)

    def leave():
        monkeypatch.setattr(Mirror, "update", real)

    followed = Followed(monkeypatch, [come_between, leave, lambda: None])
    answer = recckpt("mirror", run.url, to, "--follow")
    assert (answer.code, followed.n_looks) == (0, 4)
    [line] = answer.err.splitlines()
    assert "another `recckpt mirror`, process " in line


def test_what_is_wrong_with_the_place_from_the_start_ends_it(recckpt, run, tmp_path):
    other = run_with_chain(tmp_path / "other")
    answer = recckpt("mirror", run.url, other.url, "--follow")
    assert (answer.code, answer.out) == (1, "")
