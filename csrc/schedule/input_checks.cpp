// SPDX-License-Identifier: Apache-2.0
#include "input_checks.hpp"

#include <cmath>
#include <set>
#include <stdexcept>
#include <string>

namespace adaptra {
namespace {

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

void require_size(std::size_t size, std::int64_t expected, const char* name) {
    require(static_cast<std::int64_t>(size) == expected,
            std::string(name) + " has " + std::to_string(size) + " entries, not " + std::to_string(expected));
}

double total_of(const std::vector<double>& seconds, const char* name) {
    double total = 0.0;
    for (const double each : seconds) {
        require(each >= 0.0, std::string(name) + " has an entry that is not 0 or more");
        total += each;
    }
    return total;
}

double total_of(const std::vector<Link>& links) {
    double total = 0.0;
    for (const Link& link : links) total += total_of({link.latency, link.occupancy}, "links");
    return total;
}

void check_placement(const Problem& problem) {
    const int stages = problem.stages;
    require_size(problem.stage_at.size(), problem.virtual_stages(), "stage_of");
    std::vector<int> chunks(stages, 0);
    for (const int stage : problem.stage_at) {
        require(stage >= 0 && stage < stages && chunks[stage]++ < problem.chunks, "stage_of has a stage too often or none");
    }
    std::set<std::pair<int, int>> joined;
    for (const Link& link : problem.links) {
        const bool known = std::min(link.source, link.target) >= 0 && std::max(link.source, link.target) < stages;
        require(known && link.source != link.target && joined.emplace(link.source, link.target).second,
                "links has one that joins no two stages, or the same ones again");
    }
    for (int v = 1; v < problem.virtual_stages(); ++v) {
        const int before = problem.stage_at[v - 1], after = problem.stage_at[v];
        require(before == after || (joined.count({before, after}) && joined.count({after, before})),
                "links lacks one that messages take");
    }
}

}  // namespace

void check_problem(const Problem& problem) {
    constexpr std::int64_t kMostCodes = std::numeric_limits<Code>::max();
    const std::int64_t stages = problem.stages, chunks = problem.chunks, micro_batches = problem.micro_batches;
    require(stages > 0 && chunks > 0 && micro_batches > 0, "stages, chunks and micro-batches must be 1 or more");
    require(stages <= kMostCodes / chunks && stages * chunks <= (kMostCodes >> kCodeShift) / micro_batches,
            std::to_string(stages) + " stages, " + std::to_string(chunks) + " chunks and " +
                std::to_string(micro_batches) + " micro-batches are more actions than have a code");
    require_size(problem.forward.size(), stages * chunks * problem.width, "forward_s");
    require_size(problem.backward_input.size(), stages * chunks * problem.width, "backward_input_s");
    require_size(problem.backward_weight.size(), stages * chunks * problem.width, "backward_weight_s");
    require_size(problem.backward.size(), stages * chunks * problem.width, "backward_s");
    check_placement(problem);
    if (!problem.combined_saving.empty()) {
        require_size(problem.combined_saving.size(), stages * chunks * chunks, "combined_saving");
    }
    for (const double saving : problem.combined_saving) {
        require(saving >= -1.0 && saving <= 1.0, "combined_saving has an entry that is not between -1 and 1");
    }
    require(problem.combined_sends_at > 0.0 && problem.combined_sends_at <= 1.0, "combined_sends_at is not above 0 and at most 1");
    require_size(problem.cap.size(), stages, "cap");
    require_size(problem.released.size(), stages, "released");
    for (const double cap : problem.cap) require(cap >= 1.0, "cap has an entry that is not 1 or more");
    const double seconds = total_of(problem.forward, "forward_s") +
                           total_of(problem.backward_input, "backward_input_s") +
                           total_of(problem.backward_weight, "backward_weight_s") +
                           total_of(problem.backward, "backward_s") +
                           static_cast<double>(chunks) * total_of(problem.links);
    // Twice: a lower bound adds what is before an action to what is after it. Twice again: combined, all may take as much.
    require(std::isfinite(4.0 * static_cast<double>(micro_batches) * seconds), "the seconds are no finite number");
    for (const double released : problem.released) {
        require(std::isfinite(released) && released <= 1.0, "released has an entry that is not finite and at most 1");
    }
}

CodeRange range_of(const Orders& orders) {
    CodeRange range;
    for (const Order& order : orders) {
        for (const Code code : order) range = {std::min(range.least, code), std::max(range.greatest, code)};
    }
    return range;
}

void check_orders(const Problem& problem, const Orders& orders, CodeRange range, Code least) {
    require_size(orders.size(), problem.stages, "orders");
    const Code beyond = problem.code(kForward, 0, problem.micro_batches);
    require(range.least >= least && range.greatest < beyond,
            "codes from " + std::to_string(range.least) + " to " + std::to_string(range.greatest) +
                " are not all between " + std::to_string(least) + " and " + std::to_string(beyond - 1));
    for (const Order& order : orders) {
        for (std::size_t place = 0; place < order.size(); ++place) {
            if (unit_size(order[place]) == 1) continue;
            require(kind_of(order[place]) == kForward && place + 1 < order.size() && order[place + 1] >= 0 &&
                        sends_gradient(kind_of(order[place + 1])),
                    "only a forward with a backward right behind it is combined");
        }
    }
}

}  // namespace adaptra
