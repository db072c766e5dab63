import pytest

from xorl_lab.errors import EngineError, StoreError
from xorl_lab.futures import APIFuture
from xorl_lab.lab.autosave import Autosave, step_of
from xorl_lab.types.checkpoints import DeleteCheckpointResponse
from xorl_lab.types.results import SaveWeightsResponse


class Fake:
    """Client, shelf and record in one."""

    def __init__(self):
        self.saved, self.deleted, self.events = [], [], []
        self.broken = None
        self.answer = DeleteCheckpointResponse(True)

    def save_state(self, name, overwrite):
        assert overwrite
        future = APIFuture()
        if self.broken:
            future.set_exception(self.broken)
        else:
            self.saved.append(name)
            future.set_result(SaveWeightsResponse(f"xorl://m/weights/{name}", "m"))
        return future

    def delete_checkpoint(self, which):
        self.deleted.append(which)
        if isinstance(self.answer, Exception):
            raise self.answer
        return APIFuture.completed(self.answer)

    def event(self, kind, text, *, step=None, data=None):
        self.events.append((kind, text, step))


@pytest.fixture
def fake():
    return Fake()


def autosave(fake, **settings):
    return Autosave(fake, fake, fake, **{"every": 2, "keep": 0, **settings})


def test_every_so_many_steps_and_never_twice(fake):
    saver = autosave(fake)
    for step in range(1, 6):
        saver.after(step)
    saver.save(4)
    saver.save(5)
    saver.save(5)
    assert fake.saved == ["step-2", "step-4", "step-5"]
    assert fake.events[0] == ("checkpoint", "saved as step-2", 2)


def test_none_on_the_way(fake):
    saver = autosave(fake, every=0)
    for step in range(1, 6):
        saver.after(step)
    assert fake.saved == []


def test_the_latest_are_kept_those_of_earlier_attempts_counted(fake):
    saver = autosave(fake, every=1, keep=2, saved=4, earlier=[2, 4])
    for step in range(4, 7):
        saver.after(step)
    assert fake.saved == ["step-5", "step-6"]
    assert fake.deleted == ["weights/step-2", "weights/step-4"]


def test_a_checkpoint_that_is_saved_again_counts_once(fake):
    saver = autosave(fake, every=1, keep=2, earlier=[1, 2])
    saver.save(2)
    assert fake.deleted == []


@pytest.mark.parametrize("error", [OSError(28, "full"), EngineError("no")])
def test_what_cannot_be_saved_is_a_warning_on_the_way_and_an_error_when_asked(fake, error):
    saver = autosave(fake)
    fake.broken = error
    saver.after(2)
    ((kind, text, step),) = fake.events
    assert (kind, step) == ("warning", 2)
    assert text.startswith("the weights behind step 2 could not be saved: ")
    with pytest.raises(type(error)):
        saver.save(2)
    fake.broken = None
    saver.save(2)
    assert fake.saved == ["step-2"]


def test_a_record_that_refuses_too_is_left_to_the_next_step(fake, monkeypatch):
    def refuse(*_, **__):
        raise StoreError("full")

    saver = autosave(fake)
    monkeypatch.setattr(fake, "event", refuse)
    saver.after(2)


@pytest.mark.parametrize(
    ("answer", "warned"),
    [
        (DeleteCheckpointResponse(False, None, "checkpoint.not_found: gone"), None),
        (DeleteCheckpointResponse(False, None, "in use"), "step-1 was not deleted: in use"),
        (OSError(13, "denied"), "step-1 was not deleted: [Errno 13] denied"),
    ],
)
def test_what_cannot_be_deleted_is_a_warning(fake, answer, warned):
    fake.answer = answer
    saver = autosave(fake, every=1, keep=1)
    saver.after(1)
    saver.after(2)
    said = [text for kind, text, _ in fake.events if kind == "warning"]
    assert said == ([] if warned is None else [warned])


def test_a_prefix_of_its_own(fake):
    autosave(fake, prefix="mine").save(3)
    assert fake.saved == ["mine-3"]


def test_steps_of_names():
    assert step_of("step-12") == 12
    assert step_of("xorl://m/weights/step-3") == 3
    for name in ("mine-3", "step-", "step-3a", "astep-3"):
        assert step_of(name) is None
