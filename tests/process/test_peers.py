"""Libraries of others in workers. What is not installed is not tested: `make causes` shows how to have it."""

import numpy as np
import pytest
from torch.utils.data import Dataset

from holdfast import DataLoader, Policy


class Blurred(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import cv2

        cv2.GaussianBlur(np.zeros((500, 500, 3), np.uint8), (31, 31), 5)
        return cv2.getNumThreads()


def test_opencv_may_have_been_used_before_the_fork():
    """A worker lets it have no threads, and waits for none of those that the fork did not copy."""
    pytest.importorskip("cv2")
    from tests.faults.peers import opencv_in_the_trainer

    opencv_in_the_trainer()
    loader = DataLoader(Blurred(), batch_size=4, num_workers=2, timeout=20, policy=Policy(sample_timeout=5))
    assert [count for batch in loader for count in batch.tolist()] == [1] * 8
    assert loader.incidents == ()
