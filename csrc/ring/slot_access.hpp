// SPDX-License-Identifier: Apache-2.0
// Python face of single slots, for hardware that moves the bytes (RNICs, devices): where slots are, claiming and taking.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>

#include "ring.hpp"

namespace adaptra {

struct ClosedError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Adds the methods to `ring`; those that wait do so without the GIL.
void define_slot_access(pybind11::class_<Ring, std::shared_ptr<Ring>>& ring);

}  // namespace adaptra
