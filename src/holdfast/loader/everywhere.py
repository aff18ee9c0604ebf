"""`from torch.utils.data import DataLoader` gives Holdfast's: for programs that shall not be changed."""

import torch.utils.data
import torch.utils.data.dataloader

from holdfast.loader.dataloader import DataLoader


def replace_torchs_loader() -> None:
    """From now on, for whoever asks torch for the name. What was imported before keeps torch's own.

    Ours is a subclass of torch's: `isinstance` of a loader with either of them stays true.
    """
    torch.utils.data.DataLoader = DataLoader  # type: ignore[misc]
    torch.utils.data.dataloader.DataLoader = DataLoader  # type: ignore[misc]
