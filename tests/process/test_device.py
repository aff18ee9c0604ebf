"""`device=` and `pin_memory=` on machines without one: everything imports and works, or says what is missing."""

import inspect
import warnings

import pytest
import torch

from holdfast import DataLoader

from .data import Images, Numbers

NO_CUDA = not torch.cuda.is_available()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_on_the_host_batches_stay_where_they_are(device, workers):
    loader = DataLoader(Images(8), batch_size=4, num_workers=workers, device=device)
    batches = list(loader)
    assert [int(label) for _, labels in batches for label in labels] == list(range(8))
    assert all(images.device.type == "cpu" for images, _ in batches)
    assert "device_ran_s" not in loader.stats()


@pytest.mark.parametrize("workers", [0, 2])
def test_any_other_device_gets_batches_by_to(workers):
    """ "meta" is one that every torch has."""
    loader = DataLoader(Images(8), batch_size=4, num_workers=workers, device="meta")
    shapes = [(images.shape, images.device.type, labels.device.type) for images, labels in loader]
    assert shapes == [((4, 3, 256, 256), "meta", "meta")] * 2


def test_the_device_is_a_public_attribute_and_never_required():
    """Frameworks rebuild a loader from its attributes of the same names."""
    loader = DataLoader(Numbers(4), device="cpu")
    assert loader.device == "cpu"
    assert not hasattr(DataLoader(Numbers(4)), "device")
    parameters = inspect.signature(DataLoader.__init__).parameters
    again = DataLoader(**{name: value for name, value in vars(loader).items() if name in ("dataset", "device")})
    assert again.device == "cpu" and parameters["device"].default is None


def test_a_device_that_makes_no_sense_is_refused_when_the_loader_is_made():
    with pytest.raises(RuntimeError, match="gpu"):
        DataLoader(Numbers(4), device="gpu")


@pytest.mark.skipif(not NO_CUDA, reason="there is a CUDA device here")
@pytest.mark.parametrize("workers", [0, 2])
def test_without_cuda_the_error_says_so(workers):
    loader = DataLoader(Numbers(4), num_workers=workers, device="cuda")
    with pytest.raises(RuntimeError, match=r"device='cuda'.*(without CUDA|no CUDA device)"):
        iter(loader)


@pytest.mark.skipif(not NO_CUDA, reason="there is a CUDA device here")
def test_without_an_accelerator_pin_memory_warns_as_torch_does():
    """If this torch does: 2.6 says nothing."""
    said = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(list(kind(Images(8), batch_size=4, num_workers=2, pin_memory=True))) == 2
        said.append({str(warning.message) for warning in caught if "pin_memory" in str(warning.message)})
    assert said[0] == said[1]
