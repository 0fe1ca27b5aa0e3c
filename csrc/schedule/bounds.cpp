// SPDX-License-Identifier: Apache-2.0
// Why these bounds hold for every schedule. "The m-th F of virtual stage v" is whichever starts m-th there, where
// micro-batches cost the same, and micro-batch m where they differ: each kind of a chunk runs in ascending order. It needs m activations to have arrived, so m forwards of v-1 to have ended;
// the m-th B needs m gradients, the m-th W m input gradients. A whole backward is I and W in one go that sends later
// and releases later, so what bounds split schedules bounds all.
// Other costs are eased to such ones first, see `eased`.
// Earliest ends ("heads") follow by induction over m from the front of the pipeline, and, because the rules read the
// same backwards in time, least remaining times ("tails") by induction over j, the j-th from last, from its end.
// A stage and a link are machines that do one thing at a time: Jackson's preemptive schedule (Carlier 1982) of all its
// actions with their heads and tails is no longer than any real one.
#include "bounds.hpp"

#include <cmath>
#include <numeric>

#include "waves.hpp"

namespace adaptra {
namespace {

// Sums of the same seconds in another order than a simulation's must not end above it.
constexpr double kRounding = 1.0 - 1e-12;

// Jobs of one kind on one machine: heads ascend and tails descend, so they are best taken in their order.
struct JobClass {
    std::vector<double> seconds;
    std::vector<double> head;  // earliest start
    std::vector<double> tail;  // least time from its end to the end of the iteration
};

double jackson_bound(const std::vector<JobClass>& classes) {
    std::vector<std::size_t> next(classes.size(), 0);
    std::vector<double> left(classes.size());
    for (std::size_t c = 0; c < classes.size(); ++c) left[c] = classes[c].seconds.empty() ? 0.0 : classes[c].seconds[0];
    double now = 0.0, bound = 0.0;
    while (true) {
        std::size_t chosen = classes.size();
        double soonest = kNever;
        for (std::size_t c = 0; c < classes.size(); ++c) {
            if (next[c] == classes[c].head.size()) continue;
            const double head = classes[c].head[next[c]];
            if (head > now) {
                soonest = std::min(soonest, head);
            } else if (chosen == classes.size() || classes[c].tail[next[c]] > classes[chosen].tail[next[chosen]]) {
                chosen = c;
            }
        }
        if (chosen == classes.size()) {
            if (soonest == kNever) return bound;
            now = soonest;
            continue;
        }
        if (now + left[chosen] > soonest) {  // something more urgent may arrive before it is done
            left[chosen] -= soonest - now;
            now = soonest;
            continue;
        }
        now += left[chosen];
        bound = std::max(bound, now + classes[chosen].tail[next[chosen]]);
        if (++next[chosen] < classes[chosen].seconds.size()) left[chosen] = classes[chosen].seconds[next[chosen]];
    }
}

// What the cap of a stage is checked against, over all its chunks.
struct StageMemory {
    double least_forward = kNever, least_input = kNever, least_weight = kNever, most_input = 0.0;
    std::vector<double> input_ends, weight_ends;  // ascending
    // [j]: the largest, over i <= j, of the earliest start of B number i less i times the least F + B + W.
    std::vector<double> input_start_less_work;
    std::size_t unchanged = 0;  // entries of input_start_less_work that are as input_ends has them
};

class Bounds {
public:
    // `input_elapsed`: least time from the start of an I to its end, by row and micro-batch; empty: its seconds.
    Bounds(const Problem& problem, bool with_caps, std::vector<double> input_elapsed = {});
    Bound best() const;
    Urgency remaining() const;

private:
    std::size_t slot(int virtual_stage, int index) const {
        return static_cast<std::size_t>(virtual_stage) * count_ + index;
    }
    const Link& forward_link(int virtual_stage) const { return link_out(virtual_stage, true); }
    const Link& link_out(int virtual_stage, bool forward) const;
    double before(const std::vector<double>& values, int virtual_stage, int index) const {
        return index == 0 ? 0.0 : values[slot(virtual_stage, index - 1)];
    }
    void add_up(int virtual_stage, int micro_batch);
    void heads(int index);
    void tails(int index);
    double room_at(int virtual_stage, int index) const;
    void remember(int index);
    double tail_of_forward_that_waits(int virtual_stage, int index, double cap) const;
    Bound stage_bound(int stage) const;
    Bound link_bound(int link) const;
    int messages_on(int link) const;
    double forward_seconds(int v, int m) const { return problem_.seconds(kForward, problem_.row(v), m); }
    double input_seconds(int v, int m) const { return problem_.seconds(kBackwardInput, problem_.row(v), m); }
    double input_elapsed(int v, int m) const { return input_elapsed_[entry(problem_.row(v), m)]; }
    double weight_seconds(int v, int m) const { return problem_.seconds(kBackwardWeight, problem_.row(v), m); }
    // Entry of a table below for a stage or virtual stage, and a micro-batch.
    std::size_t entry(int place, int m) const {
        return static_cast<std::size_t>(place) * problem_.width + m * problem_.step;
    }

    const Problem& problem_;
    const bool with_caps_;
    const std::vector<double> input_elapsed_;
    const int count_;
    const int virtual_stages_;
    // Heads: earliest end of the (index+1)-th action. Tails: least time from the start of the (index+1)-th from last.
    std::vector<double> forward_end_, input_end_, weight_end_;
    std::vector<double> forward_left_, input_left_, weight_left_;
    std::vector<double> activation_sent_, gradient_sent_;  // [virtual stage]: earliest end of its latest occupancy
    std::vector<double> activation_left_, gradient_left_;  // [virtual stage]: least time from its transfer's start
    std::vector<double> input_work_, forward_work_;        // [virtual stage]: machine bounds, see heads and tails
    std::vector<StageMemory> memory_;                      // [stage]
    std::vector<Waves> waves_;                             // [stage]; empty: without caps, or of one chunk
    std::vector<double> input_tail_, forward_tail_;        // [virtual stage]: work of the latest indices, see tails
    std::vector<double> stage_work_;                       // [stage]: of all micro-batches
    // Sums over chunks of a stage, from the virtual stage's chunk up or down, by `entry`.
    std::vector<double> all_forward_, all_input_, all_weight_, input_from_, input_to_, weight_to_, forward_from_;
};

Bounds::Bounds(const Problem& problem, bool with_caps, std::vector<double> input_elapsed)
    : problem_(problem), with_caps_(with_caps),
      input_elapsed_(input_elapsed.empty() ? problem.backward_input : std::move(input_elapsed)),
      count_(problem.micro_batches), virtual_stages_(problem.virtual_stages()) {
    for (auto* table : {&forward_end_, &input_end_, &weight_end_, &forward_left_, &input_left_, &weight_left_}) {
        table->assign(problem.slots(), 0.0);
    }
    for (auto* row : {&activation_sent_, &gradient_sent_, &activation_left_, &gradient_left_, &input_work_,
                      &forward_work_, &input_tail_, &forward_tail_}) {
        row->assign(virtual_stages_, 0.0);
    }
    for (auto* row : {&input_from_, &input_to_, &weight_to_, &forward_from_}) {
        row->assign(static_cast<std::size_t>(virtual_stages_) * problem.width, 0.0);
    }
    for (auto* row : {&all_forward_, &all_input_, &all_weight_}) {
        row->assign(static_cast<std::size_t>(problem.stages) * problem.width, 0.0);
    }
    stage_work_.assign(problem.stages, 0.0);
    memory_.resize(problem.stages);
    for (int stage = 0; with_caps && problem.chunks > 1 && stage < problem.stages; ++stage) {
        waves_.push_back(waves_of(problem, stage, input_elapsed_));
    }
    for (int v = 0; v < virtual_stages_; ++v) {
        for (int m = 0; m < problem.width; ++m) add_up(v, m);
    }
    for (int index = 0; index < count_; ++index) heads(index);
    for (int index = 0; index < count_; ++index) tails(index);
}

void Bounds::add_up(int v, int m) {
    const int stage = problem_.stage_of(v);
    all_forward_[entry(stage, m)] += forward_seconds(v, m);
    all_input_[entry(stage, m)] += input_seconds(v, m);
    all_weight_[entry(stage, m)] += weight_seconds(v, m);
    const double work = forward_seconds(v, m) + input_seconds(v, m) + weight_seconds(v, m);
    stage_work_[stage] += work * count_ / problem_.width;
    StageMemory& memory = memory_[stage];
    memory.least_forward = std::min(memory.least_forward, forward_seconds(v, m));
    memory.least_input = std::min(memory.least_input, input_seconds(v, m));
    memory.least_weight = std::min(memory.least_weight, weight_seconds(v, m));
    memory.most_input = std::max(memory.most_input, input_seconds(v, m));
    for (int chunk = 0; chunk < problem_.chunks; ++chunk) {
        const int other = problem_.virtual_stage(stage, chunk);
        if (other >= v) {
            input_from_[entry(v, m)] += input_seconds(other, m);
            forward_from_[entry(v, m)] += forward_seconds(other, m);
        }
        if (other <= v) {
            input_to_[entry(v, m)] += input_seconds(other, m);
            weight_to_[entry(v, m)] += weight_seconds(other, m);
        }
    }
}

const Link& Bounds::link_out(int virtual_stage, bool forward) const {
    static const Link kFree;
    const int link = problem_.link_out(forward ? kForward : kBackward, virtual_stage);
    return link < 0 ? kFree : problem_.links[link];
}

void Bounds::heads(int index) {
    for (int v = 0; v < virtual_stages_; ++v) {
        double start = std::max(before(forward_end_, v, index), room_at(v, index));
        if (v > 0) {
            const Link& link = forward_link(v - 1);
            activation_sent_[v] = std::max(activation_sent_[v], forward_end_[slot(v - 1, index)]) + link.occupancy;
            start = std::max(start, activation_sent_[v] + link.latency);
        }
        if (!waves_.empty() && problem_.chunk_of(v) + 1 == problem_.chunks) {
            const int stage = problem_.stage_of(v), first = problem_.virtual_stage(stage, 0);
            const double first_start = forward_end_[slot(first, 0)] - forward_seconds(first, 0);
            start = std::max(start, first_start + waves_[stage].delay(index));
        }
        forward_end_[slot(v, index)] = start + forward_seconds(v, index);
    }
    for (int v = virtual_stages_ - 1; v >= 0; --v) {
        const int stage = problem_.stage_of(v);
        double start = std::max(before(input_end_, v, index), forward_end_[slot(v, index)]);
        if (v + 1 < virtual_stages_) {
            const Link& link = link_out(v + 1, false);
            gradient_sent_[v] = std::max(gradient_sent_[v], input_end_[slot(v + 1, index)]) + link.occupancy;
            start = std::max(start, gradient_sent_[v] + link.latency);
        }
        // From the start of the stage's first-chunk F number k to the end of this B lie F k..index of all chunks and
        // B k..index of this and later chunks: the running maximum over k.
        const int first = problem_.virtual_stage(stage, 0);
        const double first_start = forward_end_[slot(first, index)] - forward_seconds(first, index);
        input_work_[v] = std::max(input_work_[v], first_start) + all_forward_[entry(stage, index)] + input_from_[entry(v, index)];
        const double end = std::max(start + input_elapsed(v, index), input_work_[v]);
        input_end_[slot(v, index)] = end;
        weight_end_[slot(v, index)] = std::max(before(weight_end_, v, index), end) + weight_seconds(v, index);
    }
    if (with_caps_) remember(index);
}

void Bounds::remember(int index) {
    const auto insert = [](std::vector<double>& list, double end) {
        const auto place = std::upper_bound(list.begin(), list.end(), end);
        const auto position = static_cast<std::size_t>(place - list.begin());
        list.insert(place, end);
        return position;
    };
    for (int v = 0; v < virtual_stages_; ++v) {
        StageMemory& memory = memory_[problem_.stage_of(v)];
        memory.unchanged = std::min(memory.unchanged, insert(memory.input_ends, input_end_[slot(v, index)]));
        insert(memory.weight_ends, weight_end_[slot(v, index)]);
    }
    for (StageMemory& memory : memory_) {
        const double work = memory.least_forward + memory.least_input + memory.least_weight;
        const std::size_t first = memory.unchanged, known = memory.input_ends.size();
        memory.unchanged = known;
        memory.input_start_less_work.resize(known);
        double largest = first == 0 ? -kNever : memory.input_start_less_work[first - 1];
        for (std::size_t i = first; i < known; ++i) {
            largest = std::max(largest, memory.input_ends[i] - memory.most_input - static_cast<double>(i) * work);
            memory.input_start_less_work[i] = largest;
        }
    }
}

// Earliest moment at which the cap leaves room for F number `index` of this virtual stage. When it starts, at least
// `started` forwards of the stage's chunks have, itself included (each earlier chunk has run as many), and only
// backwards of earlier micro-batches can have ended, because those of this one need it. Room means
// released * inputs + (1 - released) * weights >= started - cap; the best mix of inputs and weights decides. The mix
// takes at least
//  - the head of its last input and of its last weight gradient,
//  - the work done before it since the stage's first action, and, for any j,
//  - the work done before it since the j-th B started: by then j - 1 B, as many W and cap + j - 1 F, at most, were
//    over.
double Bounds::room_at(int v, int index) const {
    const int stage = problem_.stage_of(v);
    const double cap = problem_.cap[stage] + kCapTolerance, released = problem_.released[stage];
    const int started = (problem_.chunk_of(v) + 1) * (index + 1);
    const double missing = started - cap;
    if (!with_caps_ || missing <= 0.0) return 0.0;
    const StageMemory& memory = memory_[stage];
    const int first = problem_.virtual_stage(stage, 0);
    const double first_start = forward_end_[slot(first, 0)] - forward_seconds(first, 0);
    const int forwards_waiting = started - 1 - static_cast<int>(std::floor(cap));
    double best = kNever;
    for (int inputs = std::max(1, static_cast<int>(std::ceil(missing))); inputs <= problem_.chunks * index; ++inputs) {
        double time = memory.input_ends[inputs - 1];
        if (time >= best) break;
        const double lacking = missing - released * inputs;
        const int weights = lacking > 0.0 ? static_cast<int>(std::ceil(lacking / (1.0 - released) - kCapTolerance)) : 0;
        if (weights > inputs) continue;
        if (weights > 0) time = std::max(time, memory.weight_ends[weights - 1]);
        const double backwards = inputs * memory.least_input + weights * memory.least_weight;
        time = std::max(time, first_start + (started - 1) * memory.least_forward + backwards);
        const int since = std::min({weights, inputs - 1, forwards_waiting});
        if (since >= 0) {
            const double work = forwards_waiting * memory.least_forward + backwards;
            time = std::max(time, memory.input_start_less_work[since] + work);
        }
        best = std::min(best, time);
    }
    return best == kNever ? 0.0 : best;
}

void Bounds::tails(int index) {
    const int chunks = problem_.chunks, m = count_ - 1 - index;
    for (int v = 0; v < virtual_stages_; ++v) {
        const int stage = problem_.stage_of(v);
        // B and W of micro-batch k of the last chunk must end before its F number k + floor(cap) can start (with
        // more chunks: less the one forward that each of them may be ahead).
        const double cap = problem_.cap[stage] + kCapTolerance - (chunks - 1);
        const double released = problem_.released[stage];
        const double weight_cap = released < 1.0 ? (cap - released) / (1.0 - released) : kNever;
        weight_left_[slot(v, index)] =
            weight_seconds(v, m) + std::max(before(weight_left_, v, index),
                                         chunks > 1 ? 0.0 : tail_of_forward_that_waits(v, index, weight_cap));
        input_tail_[v] += input_to_[entry(v, m)] + weight_to_[entry(v, m)];
        double after = std::max({before(input_left_, v, index), weight_left_[slot(v, index)],
                                 tail_of_forward_that_waits(v, index, cap),
                                 input_tail_[v] - input_seconds(v, m)});
        if (v > 0) {
            const Link& link = link_out(v, false);
            gradient_left_[v] =
                std::max(gradient_left_[v], input_left_[slot(v - 1, index)] + link.latency) + link.occupancy;
            after = std::max(after, gradient_left_[v]);
        }
        input_left_[slot(v, index)] = after + input_elapsed(v, m);
    }
    for (int v = virtual_stages_ - 1; v >= 0; --v) {
        const int stage = problem_.stage_of(v);
        double after = std::max(before(forward_left_, v, index), input_left_[slot(v, index)]);
        if (v + 1 < virtual_stages_) {
            const Link& link = forward_link(v);
            activation_left_[v] =
                std::max(activation_left_[v], forward_left_[slot(v + 1, index)] + link.latency) + link.occupancy;
            after = std::max(after, activation_left_[v]);
        }
        // The mirror image of input_work_: F of this and later chunks, B of all chunks, up to the first chunk's B.
        const int first = problem_.virtual_stage(stage, 0);
        const double first_tail = input_left_[slot(first, index)] - input_elapsed(first, m);
        forward_work_[v] = std::max(forward_work_[v], first_tail) + all_input_[entry(stage, m)] + forward_from_[entry(v, m)];
        forward_tail_[v] += forward_from_[entry(v, m)] + all_input_[entry(stage, m)] + all_weight_[entry(stage, m)];
        forward_left_[slot(v, index)] = std::max({after + forward_seconds(v, m), forward_work_[v], forward_tail_[v]});
    }
}

double Bounds::tail_of_forward_that_waits(int v, int index, double cap) const {
    // Below 1 no schedule fits the cap, and any bound holds.
    if (!with_caps_ || cap >= count_ || cap < 1.0) return 0.0;
    const int later = index - static_cast<int>(std::floor(cap));
    if (later < 0) return 0.0;
    const int last_chunk = problem_.virtual_stage(problem_.stage_of(v), problem_.chunks - 1);
    return forward_left_[slot(last_chunk, later)];
}

Bound Bounds::stage_bound(int stage) const {
    std::vector<JobClass> classes;
    const auto add = [&](int v, Kind kind, const std::vector<double>& end, const std::vector<double>& left) {
        JobClass jobs;
        for (int index = 0; index < count_; ++index) {
            const double seconds = problem_.seconds(kind, problem_.row(v), index);
            jobs.seconds.push_back(seconds);
            jobs.head.push_back(end[slot(v, index)] - seconds);
            const double elapsed = kind == kBackwardInput ? input_elapsed(v, index) : seconds;
            jobs.tail.push_back(left[slot(v, count_ - 1 - index)] - elapsed);
        }
        classes.push_back(std::move(jobs));
    };
    for (int chunk = 0; chunk < problem_.chunks; ++chunk) {
        const int v = problem_.virtual_stage(stage, chunk);
        add(v, kForward, forward_end_, forward_left_);
        add(v, kBackwardInput, input_end_, input_left_);
        add(v, kBackwardWeight, weight_end_, weight_left_);
    }
    return {jackson_bound(classes), "stage", stage};
}

Bound Bounds::link_bound(int link) const {
    std::vector<JobClass> classes;
    const Link& cost = problem_.links[link];
    const auto add = [&](int from, int to, const std::vector<double>& end, const std::vector<double>& left) {
        JobClass jobs;
        jobs.seconds.assign(count_, cost.occupancy);
        for (int index = 0; index < count_; ++index) {
            jobs.head.push_back(end[slot(from, index)]);
            jobs.tail.push_back(cost.latency + left[slot(to, count_ - 1 - index)]);
        }
        classes.push_back(std::move(jobs));
    };
    for (int v = 0; v < virtual_stages_; ++v) {
        if (problem_.activation_link[v] == link) add(v, v + 1, forward_end_, forward_left_);
        if (problem_.gradient_link[v] == link) add(v, v - 1, input_end_, input_left_);
    }
    return {jackson_bound(classes), "link", link};
}

Urgency Bounds::remaining() const {
    Urgency urgency{forward_left_, input_left_, weight_left_};
    for (auto* table : {&urgency.forward, &urgency.backward, &urgency.weight}) {
        for (auto row = table->begin(); row != table->end(); row += count_) std::reverse(row, row + count_);
    }
    return urgency;
}

// Heads and tails carry one machine's bound over to others: of equal bounds, the one with the most work is named.
Bound Bounds::best() const {
    Bound best{0.0, "stage", 0};
    double best_work = -1.0;
    const auto consider = [&](const Bound& found, double work) {
        if (found.seconds < best.seconds * kRounding) return;
        if (found.seconds <= best.seconds / kRounding && work <= best_work) return;
        best = {std::max(found.seconds, best.seconds), found.kind, found.place};
        best_work = work;
    };
    for (int stage = 0; stage < problem_.stages; ++stage) {
        consider(stage_bound(stage), stage_work_[stage]);
    }
    for (int link = 0; link < static_cast<int>(problem_.links.size()); ++link) {
        const double occupancy = problem_.links[link].occupancy;
        if (occupancy > 0.0) consider(link_bound(link), count_ * messages_on(link) * occupancy);
    }
    return best;
}

// Messages per micro-batch.
int Bounds::messages_on(int link) const {
    int messages = 0;
    for (int v = 0; v < virtual_stages_; ++v) {
        messages += (problem_.activation_link[v] == link) + (problem_.gradient_link[v] == link);
    }
    return messages;
}

// A problem that every schedule of `problem` solves in no more time, without what the induction leaves out:
// - Where a whole backward takes less than I and W, both take less: I' = min(I, B), I' + W' = min(I + W, B). Then W' is
//   at most W, and a whole backward takes no less than I' and W' in one go.
// - An input gradient that adds activations adds none. A schedule holds less then, so it keeps the caps that it kept.
// - Over a rendezvous link a message also waits for its receive, and in a shared queue computation waits for others'
//   messages: both only delay.
Problem eased(Problem problem) {
    for (std::size_t row = 0; problem.backward_differs && row < problem.backward.size(); ++row) {
        double& input = problem.backward_input[row];
        double& weight = problem.backward_weight[row];
        const double whole = problem.backward[row];
        if (whole >= input + weight) continue;
        input = std::min(input, whole);
        weight = whole - input;
    }
    for (double& released : problem.released) released = std::max(released, 0.0);
    return problem;
}

// What every schedule of `problem` with combined actions solves in no more time, with none: in place of a combined action
// its F runs, then its I, both over before their messages left, then its W. All that combining saves is taken off I and W.
// An I that runs alone is put at the end of its time, so between the arrival of a gradient and the end of its I lie the F
// that it is combined with, or what its I takes alone: see `input_elapsed`.
Problem eased_of_combining(Problem problem) {
    const Problem given = problem;
    const int chunks = given.chunks, most = given.step == 0 ? 1 : given.micro_batches;
    const double share = given.combined_sends_at;
    const auto combined = [&](int stage, Kind kind, int chunk, int m, int other, int n) {
        return given.combined_seconds(stage, given.code(kForward, chunk, m), given.code(kind, other, n));
    };
    const auto each = [&](auto&& use) {
        for (int stage = 0; stage < given.stages; ++stage) {
            for (int chunk = 0; chunk < chunks; ++chunk) {
                for (int m = 0; m < most; ++m) use(stage, chunk, m, (stage * chunks + chunk) * given.width + m);
            }
        }
    };
    each([&](int stage, int chunk, int m, int entry) {
        for (int other = 0; other < chunks; ++other) {
            for (int n = 0; n < most; ++n) {
                const double sent = share * combined(stage, kBackwardInput, chunk, m, other, n);
                problem.forward[entry] = std::min(problem.forward[entry], sent);
            }
        }
    });
    each([&](int stage, int other, int n, int entry) {
        for (int chunk = 0; chunk < chunks; ++chunk) {
            for (int m = 0; m < most; ++m) {
                const double forward = problem.seconds(kForward, stage * chunks + chunk, m);
                const double sent = share * std::min(combined(stage, kBackwardInput, chunk, m, other, n),
                                                     combined(stage, kBackward, chunk, m, other, n));
                problem.backward_input[entry] = std::min(problem.backward_input[entry], std::max(0.0, sent - forward));
            }
        }
        for (int chunk = 0; chunk < chunks; ++chunk) {
            for (int m = 0; m < most; ++m) {
                const double forward = problem.seconds(kForward, stage * chunks + chunk, m);
                const double left = combined(stage, kBackward, chunk, m, other, n) - forward - problem.backward_input[entry];
                problem.backward_weight[entry] = std::min(problem.backward_weight[entry], std::max(0.0, left));
            }
        }
    });
    return problem;
}

// `eased`: of `given`, by `eased_of_combining`.
std::vector<double> input_elapsed(const Problem& given, const Problem& eased) {
    std::vector<double> elapsed = given.backward_input;
    const int row_width = given.chunks * given.width;
    for (int entry = 0; entry < static_cast<int>(elapsed.size()); ++entry) {
        const auto forwards = eased.forward.begin() + entry / row_width * row_width;
        const double forward = *std::min_element(forwards, forwards + row_width);
        elapsed[entry] = std::min(elapsed[entry], forward + eased.backward_input[entry]);
    }
    return elapsed;
}

// What is not combined, of a stage: before its first gradient can be there, only F that are not run, no more than its
// cap, of which x take at most the x longest. Then as many B are not combined either, and with the others as much is
// saved as can be. The stage idles until the gradient, or saves less. `problem`: eased but for combining; micro-batches
// cost the same.
Bound alone_bound(const Problem& problem) {
    Bound best{0.0, "stage", 0};
    const int last = problem.virtual_stages() - 1, count = problem.micro_batches;
    const auto least = [&](Kind kind, int v) {  // until the message leaves
        const int stage = problem.stage_of(v), chunk = problem.chunk_of(v);
        double seconds = problem.seconds(kind, problem.row(v), 0);
        if (kind == kForward) return seconds;  // before the first backward, which none can be combined with
        for (int other = 0; other < problem.chunks; ++other) {
            const Code one = problem.code(kind, chunk, 0), behind = problem.code(kForward, other, 0);
            seconds = std::min(seconds, problem.combined_sends_at * problem.combined_seconds(stage, behind, one));
        }
        return seconds;
    };
    std::vector<double> activation(last + 1), gradient(last + 1);  // earliest arrivals
    for (int v = 0; v <= last; ++v) {
        if (v > 0) activation[v] += problem.transfer(problem.activation_link[v - 1]);
        (v < last ? activation[v + 1] : gradient[last]) = activation[v] + least(kForward, v);
    }
    for (int v = last; v > 0; --v) gradient[v - 1] = gradient[v] + least(kBackwardInput, v) + problem.transfer(problem.gradient_link[v]);
    for (int stage = 0; stage < problem.stages; ++stage) {
        const double head = activation[problem.virtual_stage(stage, 0)];
        double first_gradient = kNever, work = 0.0;
        std::vector<double> forwards, savings;
        for (int chunk = 0; chunk < problem.chunks; ++chunk) {
            const int row = stage * problem.chunks + chunk;
            first_gradient = std::min(first_gradient, gradient[problem.virtual_at[row]]);
            const double forward = problem.seconds(kForward, row, 0);
            const double backward = problem.seconds(kBackwardInput, row, 0) + problem.seconds(kBackwardWeight, row, 0);
            double saving = 0.0;
            for (int other = 0; other < problem.chunks; ++other) {
                const Code ahead = problem.code(kForward, other, 0);
                const double apart = problem.seconds(ahead, stage);
                for (const Kind kind : {kBackward, kBackwardInput}) {
                    const Code behind = problem.code(kind, chunk, 0);
                    const double whole = kind == kBackward ? backward : problem.seconds(behind, stage);
                    saving = std::max(saving, apart + whole - problem.combined_seconds(stage, ahead, behind));
                }
            }
            work += count * (forward + backward);
            forwards.insert(forwards.end(), count, forward);
            savings.insert(savings.end(), count, saving);
        }
        for (auto* list : {&forwards, &savings}) std::sort(list->rbegin(), list->rend());
        const double cap = problem.cap[stage] + kCapTolerance;
        double longest = 0.0, saved = std::accumulate(savings.begin(), savings.end(), 0.0);
        Bound found{kNever, "stage", stage};
        for (std::size_t alone = 0; alone <= forwards.size(); ++alone) {
            const double seconds = std::max(head, first_gradient - longest) + work - saved;
            const bool fits = static_cast<double>(alone + 1) <= cap;
            if (seconds < found.seconds) found = {seconds, fits ? "stage" : "memory", stage};
            if (alone == forwards.size()) break;
            if (fits) longest += forwards[alone];
            saved -= savings[savings.size() - 1 - alone];
        }
        if (found.seconds > best.seconds) best = found;
    }
    return best;
}

}  // namespace

Urgency remaining_time(const Problem& problem) { return Bounds(eased(problem), true).remaining(); }

Bound lower_bound(const Problem& any_problem) {
    const bool combines = !any_problem.combined_saving.empty();
    const Problem apart = eased(any_problem), problem = combines ? eased_of_combining(apart) : apart;
    const std::vector<double> elapsed = combines ? input_elapsed(apart, problem) : std::vector<double>();
    Bound bound = Bounds(problem, false, elapsed).best();
    if (combines && problem.step == 0) {
        const Bound alone = alone_bound(apart);
        if (alone.seconds > bound.seconds) bound = alone;
    }
    if (std::any_of(problem.cap.begin(), problem.cap.end(), [](double cap) { return cap < kNever; })) {
        const Bound with_caps = Bounds(problem, true, elapsed).best();
        if (with_caps.seconds > bound.seconds / kRounding) {
            bound = with_caps;
            if (bound.kind == "stage") bound.kind = "memory";
        }
    }
    bound.seconds *= kRounding;
    return bound;
}

}  // namespace adaptra
