"""The contract of every store that needs no server; tests/s3 has those that do."""

from pathlib import Path

import pytest
from store_contract import StoreContract

from raypp.kinds import STORES, store_forms, store_kind
from raypp.storage import ObjectStore, open_store


class TestEveryStoreOfFiles(StoreContract):
    @pytest.fixture(params=[kind.name for kind in STORES.usable() if kind.local])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
        return open_store(f"{request.param}://{tmp_path}/store")

    def test_its_url_opens_it_again(self, store: ObjectStore) -> None:
        store.put("a", b"1")
        assert open_store(store.url).get("a") == b"1"


@pytest.mark.parametrize("name", STORES.names())
def test_what_a_store_says_of_itself_is_so(name: str) -> None:
    kind = STORES.get(name)
    assert kind.summary and kind.form and kind.form in store_forms()
    assert store_kind(f"{name.upper()}://x") == kind
    assert not kind.local or not (kind.secrets or kind.endpoints), "files need no credentials"
    assert not set(kind.secrets) & {*kind.settings, *kind.files}, "a secret is shown to nobody"
