// simccl: a process group that keeps to the rules of NCCL's, on which Gloo moves the bytes.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <vector>

namespace sim {

// What the watchdog does with a collective that has taken too long. NCCL's ends the process.
enum class OnTimeout { kEndProcess, kAbortGroup };

// `gloos` has a group for each device that a rank may use: as with NCCL, each has a communicator of
// its own.
c10::intrusive_ptr<c10d::Backend> make_group(
    std::vector<c10::intrusive_ptr<c10d::Backend>> gloos, std::chrono::milliseconds timeout);
void set_on_timeout(OnTimeout action);
// Take a wait out, to show that the detector finds it: "launch" or "work"; "" for none.
void set_group_mutant(const std::string& name);

}  // namespace sim
