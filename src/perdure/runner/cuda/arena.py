"""Memory of the device at a fixed address: reserved at once, given to the driver and taken again without moving.

CUDA's calls, by ctypes. A graph captured over the memory is valid again after `commit`.

- `CudaArena`: the device's own, by the virtual-memory calls.
- `ManagedArena`: managed memory, which the driver moves between host and device.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_FROM_ANY_STREAM = 1
_HOST = -1
_OUT_OF_MEMORY = 2

MANAGED_MOST = 1 << 30
"""Bytes: a program that asks for more managed memory than a card has free can hang the card, not only itself."""


class _Memory:
    """num_bytes at an address, as torch takes them. Raises `MemoryError` where the driver has no room."""

    def __init__(self, num_bytes: int) -> None:
        assert num_bytes > 0, num_bytes
        torch.cuda.current_stream().synchronize()  # the driver's context is there
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._address = ctypes.c_uint64()
        self.num_bytes = num_bytes
        self.is_committed = False

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of the arena as one flat tensor; it is no reason for the arena to stay committed."""
        flat: torch.Tensor = torch.as_tensor(self, device="cuda")
        return flat.view(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self._address.value, False), "version": 3}

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"the device has no {self.num_bytes} bytes free")
        if code:
            raise RuntimeError(f"{name} gave {code}")


class CudaArena(_Memory):
    """At least num_bytes on the current device, committed when made. MemoryError: there is no room."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, torch.cuda.current_device()))
        step = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), 0)
        self.num_bytes = -(-num_bytes // step.value) * step.value
        self._size = ctypes.c_size_t(self.num_bytes)
        self._handle = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._size, ctypes.c_size_t(0), none, none)
        self.commit()

    def commit(self) -> None:
        """Take memory, with anything in it. MemoryError: there is none, and nothing has changed."""
        if self.is_committed:
            return
        zero = ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(self._properties), zero)
        try:
            self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._handle, zero)
            access = _Access(self._properties.location, _READ_WRITE)
            self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        except BaseException:
            self._driver.cuMemRelease(self._handle)
            raise
        self.is_committed = True

    def release(self) -> None:
        """Give the memory back to the driver; the address stays, and must not be touched until `commit`."""
        if not self.is_committed:
            return
        torch.cuda.synchronize()
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", self._handle)
        self.is_committed = False


class ManagedArena(_Memory):
    """num_bytes of managed memory, fetched to the current device when made. While it is given back it lies on the host.

    ValueError: more than `MANAGED_MOST`. MemoryError: the device has not so much free.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes > MANAGED_MOST:
            raise ValueError(f"kv_memory='managed': a pool of {num_bytes} bytes is more than {MANAGED_MOST}")
        if num_bytes > torch.cuda.mem_get_info()[0]:
            raise MemoryError(f"the device has no {num_bytes} bytes free")
        super().__init__(num_bytes)
        self._device = torch.cuda.current_device()
        size = ctypes.c_size_t(num_bytes)
        self._call("cuMemAllocManaged", ctypes.byref(self._address), size, ctypes.c_uint(_FROM_ANY_STREAM))
        weakref.finalize(self, self._driver.cuMemFree_v2, self._address).atexit = False  # a process leaves nothing
        self.commit()

    def commit(self) -> None:
        """Fetch it to the device."""
        if not self.is_committed:
            self._fetch(self._device)
            self.is_committed = True

    def release(self) -> None:
        """Fetch it to the host."""
        if self.is_committed:
            torch.cuda.synchronize()
            self._fetch(_HOST)
            self.is_committed = False

    def _fetch(self, where: int) -> None:
        size, stream = ctypes.c_size_t(self.num_bytes), ctypes.c_void_p()
        self._call("cuMemPrefetchAsync", self._address, size, ctypes.c_int(where), stream)
        torch.cuda.synchronize()
