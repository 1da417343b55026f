"""Host memory for checkpoints: given out again in the same order, never two copies in one place."""

import torch

from megappo.checkpoint.staging import Staging


def test_the_same_sizes_get_the_same_memory_again():
    staging = Staging()
    first = [
        staging.empty(n, dtype).data_ptr() for n, dtype in ((5, torch.float32), (5, torch.float32), (7, torch.int64))
    ]
    assert len(set(first)) == 3
    staging.rewind()
    again = [staging.empty(5, torch.float32).data_ptr() for _ in range(2)]
    assert again == first[:2]
    changed = staging.empty(8, torch.int64)
    assert changed.numel() == 8


def test_what_is_held_does_not_change_with_the_original():
    staging, original = Staging(), torch.arange(6.0).view(2, 3)
    held = staging.hold(original.t())
    original.zero_()
    assert held.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_views_of_staged_memory_are_not_copied_again_and_own_just_their_part():
    staging = Staging()
    for dtype in (torch.float32, torch.bfloat16):
        whole = staging.empty(6, dtype)
        part = staging.hold(whole[2:].view(2, 2))
        assert part.untyped_storage().nbytes() == part.nbytes
        whole.fill_(3)
        assert part.dtype == dtype and part.tolist() == [[3, 3], [3, 3]]


def test_held_scalars_and_empty_tensors_keep_their_shape():
    staging = Staging()
    assert staging.hold(torch.tensor(4.0)).tolist() == 4.0
    assert staging.hold(torch.empty(0, 3)).shape == (0, 3)
