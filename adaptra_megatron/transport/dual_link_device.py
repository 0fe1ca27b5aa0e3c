# SPDX-License-Identifier: Apache-2.0
"""What a link with two paths does on its device path: collected with the link's lock, done without it.

Sending and receiving are for the thread that asks for them; making and ending sessions may take time, and is for the
link's keeper.
"""

from __future__ import annotations

import logging

from adaptra_megatron.transport.cuda_device import Computed
from adaptra_megatron.transport.device_path import DevicePath, DeviceWork
from adaptra_megatron.transport.host_link_state import HostLinkState
from adaptra_megatron.transport.inlet import Inlet, InletEffects
from adaptra_megatron.transport.messages import TensorSpecification
from adaptra_megatron.transport.outlet import Outlet, OutletEffects

logger = logging.getLogger("adaptra_megatron.transport.dual_link_device")


class DeviceSide:
    """Callers hold the link's lock, unless it says otherwise."""

    def __init__(
        self, state: HostLinkState, outlet: Outlet[Computed], inlet: Inlet[TensorSpecification], path: DevicePath
    ) -> None:
        self._state, self._outlet, self._inlet, self._path = state, outlet, inlet, path
        self._work = DeviceWork()
        self._nothing = DeviceWork()
        self._told_ended = {True: False, False: False}

    @property
    def pending(self) -> bool:
        """Whether somebody is to take work."""
        return bool(self._work)

    def add(self, outlet: OutletEffects[Computed], inlet: InletEffects[TensorSpecification], *, header: bool) -> None:
        """What the two ask of the device path. `header`: whether messages must say what they look like."""
        work = self._work
        work.sends += [(send, header) for send in outlet.sends]
        work.receives += inlet.receives
        work.begin += [(True, session) for session in outlet.begin] + [(False, session) for session in inlet.begin]
        work.end += [(True, session) for session in outlet.end] + [(False, session) for session in inlet.end]

    def take_prompt(self) -> DeviceWork:
        """What takes no time; the rest stays pending."""
        work = self._work
        if not work:
            return self._nothing
        self._work = DeviceWork(begin=work.begin, end=work.end)
        return DeviceWork(sends=work.sends, receives=work.receives)

    def take_all(self) -> DeviceWork:
        """All that is pending."""
        work, self._work = self._work, DeviceWork()
        return work

    def do(self, work: DeviceWork) -> None:
        """Without the lock."""
        for send, header in work.sends:
            self._path.send(send, header=header)
        for receive in work.receives:
            self._path.receive(receive)
        for as_sender, session in work.begin:
            self._path.begin(as_sender, session)
        for as_sender, session in work.end:
            self._tell_ended(as_sender)
            self._path.end(as_sender, session)

    def _tell_ended(self, as_sender: bool) -> None:
        state = self._state
        with state.lock:
            half = self._outlet if as_sender else self._inlet
            level = logging.WARNING if half.was_healthy else logging.INFO
            if state.finished or (self._told_ended[as_sender] and not half.was_healthy):
                level = logging.DEBUG  # tried again and again, as between two stages on one GPU
            self._told_ended[as_sender] = True
            cause = half.cause
        link = f"{state.stage}->{state.peer}" if as_sender else f"{state.peer}->{state.stage}"
        logger.log(level, "link %s: the device path is down (%s); messages go by the host path", link, cause)
