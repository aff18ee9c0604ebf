"""Which transform an exception came out of is read from the frames of its traceback."""

import functools

import pytest

from holdfast.remote_exception import transform_in


def explode(sample):
    raise ValueError("bad")


class Explode:
    def __call__(self, sample):
        return helper(sample)


def helper(sample):
    raise ValueError("bad")


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, sample):
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Data:
    def __init__(self, **held):
        vars(self).update(held)

    def __getitem__(self, index):
        for name in ("transform", "target_transform", "transforms", "other"):
            if hasattr(self, name):
                return getattr(self, name)(index)
        raise ValueError("the dataset itself")


class Own(Data):
    def transform(self, sample):
        raise ValueError("bad")


class Heir(Own):
    pass


class Subset:
    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, index):
        return self.dataset[index]


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Data(transform=explode), "explode"),
        (Data(transform=Explode()), "Explode"),
        (Data(target_transform=functools.partial(explode)), "explode"),
        (Data(transforms=Compose(abs, Explode())), "Compose > Explode"),
        (Data(transform=Compose(Compose(explode))), "Compose > explode"),
        (Data(transform=lambda sample: explode(sample)), "<lambda>"),
        (Subset(Data(transform=Explode())), "Explode"),
        (Own(), "transform"),
        (Heir(), "transform"),
        (Data(other=explode), ""),
        (Data(), ""),
    ],
)
def test_the_innermost_transform_is_named(dataset, name):
    with pytest.raises(ValueError) as caught:
        dataset[3]
    assert transform_in(caught.value.__traceback__) == name


def test_libraries_of_transforms_are_known_whatever_the_dataset_calls_them():
    """torchvision.transforms.functional, called straight from __getitem__."""
    library = {"__name__": "torchvision.transforms.functional"}
    exec("def resize(sample): raise ValueError('bad')", library)
    with pytest.raises(ValueError) as caught:
        Data(other=library["resize"])[3]
    assert transform_in(caught.value.__traceback__) == "resize"


def test_no_user_code_is_run_to_find_out():
    class Trap(Data):
        @property
        def transform(self):
            raise AssertionError("looked at")

        def __getitem__(self, index):
            raise ValueError("bad")

    with pytest.raises(ValueError) as caught:
        Trap()[0]
    assert transform_in(caught.value.__traceback__) == ""
