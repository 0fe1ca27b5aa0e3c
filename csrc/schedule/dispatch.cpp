// SPDX-License-Identifier: Apache-2.0
#include "dispatch.hpp"

namespace adaptra {
namespace {

constexpr Code kIdle = -1;  // run nothing until the given time

}  // namespace

int reference_index(const Problem& problem, int group, int chunk, int micro_batch) {
    if (problem.chunks == 1) return micro_batch;
    const int first = micro_batch / group * group;
    const int size = std::min(group, problem.micro_batches - first);
    return first * problem.chunks + chunk * size + (micro_batch - first);
}

double room_needed(const Problem& problem, int group, int stage, bool split) {
    // Backwards run in the same groups with the chunks reversed; the first of a group waits for the most forwards.
    int needed = 1;
    for (int first = 0; first < problem.micro_batches; first += group) {
        const int forward = reference_index(problem, group, problem.chunks - 1, first);
        needed = std::max(needed, forward + 1 - first * problem.chunks);
    }
    return needed + (split ? added_by_input(problem.released[stage]) : 0.0);
}

int largest_group(const Problem& problem, const Split& split) {
    int group = std::min(problem.stages, problem.micro_batches);
    for (int stage = 0; stage < problem.stages; ++stage) {
        while (group > 0 && room_needed(problem, group, stage, split[stage]) > problem.cap[stage] + kCapTolerance) --group;
    }
    return group;
}

Split most_split(const Problem& problem) {
    Split split;
    for (int stage = 0; stage < problem.stages; ++stage) {
        split.push_back(room_needed(problem, 1, stage, true) <= problem.cap[stage] + kCapTolerance);
    }
    return split;
}

std::int64_t actions_of(const Problem& problem, const Split& split) {
    std::int64_t actions = 0;
    for (bool of_stage : split) actions += problem.chunks * problem.micro_batches * (of_stage ? 3 : 2);
    return actions;
}

double Dispatcher::run(const Policy& policy) {
    policy_ = policy;
    for (int stage = 0; stage < problem_.stages; ++stage) {
        const double needed = room_needed(problem_, policy.group, stage, policy.split[stage]);
        if (policy.cap[stage] + kCapTolerance < needed) return kNever;
    }
    reset();
    const std::int64_t actions = actions_of(problem_, policy.split);
    double makespan = 0.0;
    for (std::int64_t done = 0; done < actions;) {
        const int stage = winner_[1];
        if (choice_[stage].time == kNever) return kNever;
        if (choice_[stage].code != kIdle) done += choice_[stage].behind == kAlone ? 1 : 2;
        start_action(stage, choice_[stage]);
        makespan = std::max(makespan, state_[stage].free);
    }
    return makespan;
}

void Dispatcher::reset() {
    const int stages = problem_.stages;
    messages_.reset(problem_);
    if (policy_.horizon > 0) {
        expected_activation_.assign(problem_.slots(), kNever);
        expected_gradient_.assign(problem_.slots(), kNever);
    }
    state_.assign(stages, Stage{});
    next_forward_.assign(problem_.virtual_stages(), 0);
    next_backward_.assign(problem_.virtual_stages(), 0);
    choice_.assign(stages, Choice{});
    orders_.resize(stages);
    start_.resize(stages);
    end_.resize(stages);
    weight_queue_.resize(stages);
    for (int stage = 0; stage < stages; ++stage) {
        orders_[stage].clear();
        start_[stage].clear();
        end_[stage].clear();
        weight_queue_[stage].clear();
    }
    for (int v = 0; v < problem_.virtual_stages(); ++v) {
        const int row = problem_.row(v), stage = problem_.stage_of(v);
        const double backward = policy_.split[stage] ? problem_.mean_seconds(kBackwardInput, row) +
                                                           problem_.mean_seconds(kBackwardWeight, row)
                                                     : problem_.mean_seconds(kBackward, row);
        state_[stage].work += problem_.micro_batches * (problem_.mean_seconds(kForward, row) + backward);
    }
    leaves_ = 1;
    while (leaves_ < stages) leaves_ *= 2;
    // Leaves beyond the last stage stand for it: every node that joins them with real leaves has it below too.
    winner_.assign(2 * leaves_, stages - 1);
    for (int stage = 0; stage < stages; ++stage) winner_[leaves_ + stage] = stage;
    for (int stage = stages - 1; stage >= 0; --stage) update(stage);
}

bool Dispatcher::forward_fits(int stage, int index) const {
    const Stage& state = state_[stage];
    const int charged = std::max(index, state.highest) + 1;
    const double cap = policy_.cap[stage] + kCapTolerance, released = policy_.released[stage];
    if (held(charged, state.inputs, state.weights, released) > cap) return false;
    return !policy_.split[stage] || charged - state.inputs + added_by_input(released) <= cap;
}

bool Dispatcher::input_fits(int stage, int forwards) const {
    const Stage& state = state_[stage];
    const double released = policy_.released[stage];
    return released >= 0.0 ||
           held(forwards, state.inputs + 1, state.weights, released) <= policy_.cap[stage] + kCapTolerance;
}

// The earliest start of an action whose message may not wait for its link.
double Dispatcher::link_ready(Kind kind, int virtual_stage, int micro_batch) const {
    if (!policy_.paced) return 0.0;
    const int out = problem_.link_out(kind, virtual_stage);
    if (out < 0 || !problem_.links[out].rendezvous) return 0.0;
    return messages_.link_free[out] - problem_.seconds(kind, problem_.row(virtual_stage), micro_batch);
}

double Dispatcher::urgency(Kind kind, int slot) const {
    if (policy_.urgency == nullptr) return kind == kForward ? 1.0 : kind == kBackwardWeight ? 0.0 : 2.0;
    if (kind == kForward) return policy_.urgency->forward[slot];
    return kind == kBackwardWeight ? policy_.urgency->weight[slot] : policy_.urgency->backward[slot];
}

Dispatcher::Choice Dispatcher::next_backward(int stage) const {
    Choice best;
    int best_index = 0;
    for (int chunk = problem_.chunks - 1; chunk >= 0; --chunk) {
        const int virtual_stage = problem_.virtual_stage(stage, chunk);
        const int micro_batch = next_backward_[virtual_stage];
        if (micro_batch == problem_.micro_batches) continue;
        const int slot = virtual_stage * problem_.micro_batches + micro_batch;
        if (messages_.gradient[slot] == kNever) continue;
        const Kind kind = backward_kind(stage);
        if (kind == kBackwardInput && !input_fits(stage, state_[stage].forwards)) continue;
        const double time =
            std::max({state_[stage].free, messages_.gradient[slot], link_ready(kind, virtual_stage, micro_batch)});
        const int index = reference_index(problem_, policy_.group, problem_.chunks - 1 - chunk, micro_batch);
        if (time < best.time || (time == best.time && index < best_index)) {
            best = {time, problem_.code(kind, chunk, micro_batch), urgency(kind, slot)};
            best_index = index;
        }
    }
    return best;
}

Dispatcher::Choice Dispatcher::next_forward(int stage) const {
    Choice best;
    int best_index = 0;
    for (int chunk = 0; chunk < problem_.chunks; ++chunk) {
        const int virtual_stage = problem_.virtual_stage(stage, chunk);
        const int micro_batch = next_forward_[virtual_stage];
        if (micro_batch == problem_.micro_batches) continue;
        const int slot = virtual_stage * problem_.micro_batches + micro_batch;
        const int index = reference_index(problem_, policy_.group, chunk, micro_batch);
        if (messages_.activation[slot] == kNever || !forward_fits(stage, index)) continue;
        const double time =
            std::max({state_[stage].free, messages_.activation[slot], link_ready(kForward, virtual_stage, micro_batch)});
        if (time < best.time || (time == best.time && index < best_index)) {
            best = {time, problem_.code(kForward, chunk, micro_batch), urgency(kForward, slot)};
            best_index = index;
        }
    }
    return best;
}

Dispatcher::Choice Dispatcher::next_weight(int stage) const {
    const Stage& state = state_[stage];
    if (!policy_.split[stage] || state.weights == static_cast<int>(weight_queue_[stage].size())) return {};
    const Code code = weight_queue_[stage][state.weights];
    const int virtual_stage = problem_.virtual_stage(stage, problem_.chunk_in(code));
    const int slot = virtual_stage * problem_.micro_batches + problem_.micro_batch_in(code);
    return {state.free, code, urgency(kBackwardWeight, slot)};
}

Dispatcher::Choice Dispatcher::choose(int stage) const {
    const Choice candidates[] = {next_backward(stage), next_forward(stage), next_weight(stage)};
    if (policy_.pairing != Pairing::kNever) {
        const Choice both = combined(stage, candidates[0], candidates[1]);
        const Choice& weight = candidates[2];
        const double first = std::min({candidates[0].time, candidates[1].time, weight.time});
        if (both.time < kNever && (both.time <= first || policy_.pairing == Pairing::kForeseen)) {
            const bool idles = weight.time < kNever && weight.time + seconds(stage, weight) <= both.time;
            return idles && both.time > first ? weight : both;
        }
        const bool one = (candidates[0].time <= weight.time) != (candidates[1].time <= weight.time);
        if (policy_.pairing == Pairing::kPatient && one && weight.time < kNever) return weight;
    }
    const double soonest = std::min({candidates[0].time, candidates[1].time, candidates[2].time});
    if (soonest == kNever) return {};
    Choice chosen;
    for (const Choice& candidate : candidates) {
        if (candidate.time > soonest) continue;
        if (chosen.time == kNever || candidate.urgency > chosen.urgency) chosen = candidate;
    }
    return policy_.target < kNever ? wait_for_urgent(stage, chosen, candidates) : chosen;
}

// The two as one, unless one after the other, the one that can start first in front, they would be over sooner.
Dispatcher::Choice Dispatcher::combined(int stage, const Choice& backward, const Choice& forward) const {
    const double start = std::max(backward.time, forward.time);
    const bool fits = kind_of(backward.code) != kBackwardInput || input_fits(stage, state_[stage].forwards + 1);
    if (start == kNever || !fits) return {};
    const bool first = forward.time < backward.time;
    const Choice& one = first ? forward : backward;
    const Choice& other = first ? backward : forward;
    const double apart = std::max(one.time + seconds(stage, one), other.time) + seconds(stage, other);
    const Choice both{start, forward.code | kCombined, std::max(forward.urgency, backward.urgency), backward.code};
    return start + seconds(stage, both) < apart ? both : Choice{};
}

// The action to run instead of `chosen`, or kIdle until the message that it needs is expected.
Dispatcher::Choice Dispatcher::wait_for_urgent(int stage, const Choice& chosen, const Choice* candidates) const {
    const double work = state_[stage].work;
    const double end = chosen.time + seconds(stage, chosen);
    Choice first = chosen;
    const auto consider = [&](const Choice& candidate, Code code) {
        if (candidate.time <= chosen.time || candidate.time >= end || candidate.urgency <= first.urgency) return;
        const double late = end + candidate.urgency;
        if (late <= policy_.target) return;
        const double waited =
            std::max(candidate.time + seconds(stage, candidate) + chosen.urgency, candidate.time + work);
        if (waited < late) first = {candidate.time, code, candidate.urgency};
    };
    for (int index = 0; index < 3; ++index) consider(candidates[index], candidates[index].code);
    if (policy_.horizon > 0) {
        for (Kind kind : {kBackwardInput, kForward}) consider(expected_message(stage, kind), kIdle);
    }
    return first;
}

// The next F or B of the stage whose message has not been sent but is expected.
Dispatcher::Choice Dispatcher::expected_message(int stage, Kind kind) const {
    const bool forward = kind == kForward;
    const auto& known = forward ? messages_.activation : messages_.gradient;
    const auto& expected = forward ? expected_activation_ : expected_gradient_;
    Choice best;
    for (int chunk = 0; chunk < problem_.chunks; ++chunk) {
        const int virtual_stage = problem_.virtual_stage(stage, chunk);
        const int micro_batch = forward ? next_forward_[virtual_stage] : next_backward_[virtual_stage];
        if (micro_batch == problem_.micro_batches) continue;
        const int slot = virtual_stage * problem_.micro_batches + micro_batch;
        if (known[slot] < kNever || expected[slot] >= best.time || expected[slot] <= state_[stage].free) continue;
        const int index = reference_index(problem_, policy_.group, chunk, micro_batch);
        const Kind awaited = forward ? kForward : backward_kind(stage);
        if (forward ? !forward_fits(stage, index) : awaited == kBackwardInput && !input_fits(stage, state_[stage].forwards)) continue;
        best = {expected[slot], problem_.code(awaited, chunk, micro_batch), urgency(kind, slot)};
    }
    return best;
}

// Books when the messages after the one just sent would arrive if every stage on their way ran them at once.
void Dispatcher::expect(Kind kind, int virtual_stage, int micro_batch) {
    const bool forward = kind == kForward;
    const int step = forward ? 1 : -1;
    const auto& known = forward ? messages_.activation : messages_.gradient;
    auto& expected = forward ? expected_activation_ : expected_gradient_;
    int v = virtual_stage + step;
    double time = known[v * problem_.micro_batches + micro_batch];
    for (int hop = 0; hop < policy_.horizon; ++hop, v += step) {
        const int next = v + step;
        if (next < 0 || next >= problem_.virtual_stages()) return;
        time += problem_.seconds(kind, problem_.row(v), micro_batch) + problem_.transfer(problem_.link_out(kind, v));
        expected[next * problem_.micro_batches + micro_batch] = time;
    }
}

double Dispatcher::seconds(int stage, const Choice& choice) const {
    return choice.behind == kAlone ? problem_.seconds(choice.code, stage)
                                   : problem_.combined_seconds(stage, choice.code, choice.behind);
}

void Dispatcher::start_action(int stage, const Choice& choice) {
    Stage& state = state_[stage];
    if (choice.code == kIdle) {
        state.free = choice.time;
        return update(stage);
    }
    const double duration = seconds(stage, choice);
    state.free = choice.time + duration;
    if (choice.behind == kAlone) {
        const int target = book(stage, choice.code, choice.time, state.free, state.free);
        update(stage);
        if (target >= 0 && target != stage) update(target);
        return;
    }
    const double sent = choice.time + problem_.combined_sends_at * duration;
    const int next = book(stage, choice.code, choice.time, state.free, sent);
    const int previous = book(stage, choice.behind, choice.time, state.free, sent);
    update(stage);
    for (const int target : {next, previous}) {
        if (target >= 0 && target != stage) update(target);
    }
}

// Adds an action to the stage's order. Returns the stage that now can know more, or -1.
int Dispatcher::book(int stage, Code code, double start, double end, double sent) {
    Stage& state = state_[stage];
    const Kind kind = kind_of(code);
    const int chunk = problem_.chunk_in(code);
    const int micro_batch = problem_.micro_batch_in(code);
    const int virtual_stage = problem_.virtual_stage(stage, chunk);
    orders_[stage].push_back(code);
    start_[stage].push_back(start);
    end_[stage].push_back(end);
    state.work -= problem_.seconds(code, stage);
    if (kind == kForward) {
        ++state.forwards;
        ++next_forward_[virtual_stage];
        state.highest = std::max(state.highest, reference_index(problem_, policy_.group, chunk, micro_batch));
    } else if (kind == kBackwardWeight) {
        ++state.weights;
    } else {
        ++state.inputs;
        ++next_backward_[virtual_stage];
        if (kind == kBackward) {
            ++state.weights;
        } else {
            weight_queue_[stage].push_back(problem_.code(kBackwardWeight, chunk, micro_batch));
        }
    }
    const int target = messages_.deliver(problem_, kind, virtual_stage, micro_batch, sent);
    if (policy_.horizon > 0 && target >= 0 && problem_.stages > 1) expect(kind, virtual_stage, micro_batch);
    return target;
}

void Dispatcher::update(int stage) {
    choice_[stage] = choose(stage);
    for (int node = (leaves_ + stage) / 2; node > 0; node /= 2) {
        const int left = winner_[2 * node], right = winner_[2 * node + 1];
        winner_[node] = choice_[right].time < choice_[left].time ? right : left;
    }
}

}  // namespace adaptra
