"""What parent and worker process say to each other."""

from sdopt.results.records import Status


class WorkerError(Exception):
    """A worker could not answer: `status` says how it ended, `reason` why, in a line or two."""

    def __init__(self, status: Status, reason: str) -> None:
        self.status, self.reason = status, reason
        super().__init__(status, reason)  # both, because it travels between processes
