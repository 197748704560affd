"""Object stores: a directory or an S3 bucket behind one small Protocol."""

from raypp.storage.open import open_for_others, open_store
from raypp.storage.store import (
    AccessRefused,
    AlreadyExists,
    BucketMissing,
    NotFound,
    ObjectInfo,
    ObjectStore,
    ServerNotThere,
    StoreError,
    Unfinished,
)

__all__ = [
    "AccessRefused",
    "AlreadyExists",
    "BucketMissing",
    "NotFound",
    "ObjectInfo",
    "ObjectStore",
    "ServerNotThere",
    "StoreError",
    "Unfinished",
    "open_for_others",
    "open_store",
]
