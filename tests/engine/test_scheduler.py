"""The worker thread outlives the faults of what runs on it."""

from xorl_lab.engine.scheduler import Scheduler


class Faulty:
    """Background work that raises at one of its duties."""

    def __init__(self, duty: str) -> None:
        self.duty = duty
        self.failures: list[str] = []
        self.wanted = True

    def _do(self, duty: str) -> None:
        if duty == self.duty and self.wanted:
            raise OSError(f"planted in {duty}")

    def has_work(self) -> bool:
        self._do("has_work")
        return self.wanted

    def run_quantum(self) -> None:
        self._do("run_quantum")

    def sweep(self) -> None:
        self._do("sweep")

    def fail(self, error: Exception) -> None:
        self.failures.append(str(error))
        self.wanted = False

    def close(self, error: Exception) -> None:
        self.failures.append(str(error))


def test_a_fault_of_background_work_ends_that_work_and_not_the_thread():
    for duty in ("run_quantum", "sweep"):
        scheduler = Scheduler("test")
        faulty = Faulty(duty)
        scheduler.attach(faulty)
        assert scheduler.submit(lambda _: 1, name="first").result(60) == 1
        assert scheduler.submit(lambda _: 2, name="second").result(60) == 2
        assert faulty.failures == [f"planted in {duty}"]
        scheduler.close()
