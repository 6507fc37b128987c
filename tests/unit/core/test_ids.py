from penstock.core.ids import new_worker_id


def test_worker_ids_are_random_and_leave_the_bit_of_ranks():
    ids = {new_worker_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(0 < each < 1 << 62 for each in ids)
    assert max(ids) > 1 << 60
