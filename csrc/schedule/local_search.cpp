// SPDX-License-Identifier: Apache-2.0
#include "local_search.hpp"

namespace adaptra {
namespace {

constexpr std::size_t kTenure = 60;   // steps for which a move is not undone
constexpr int kStall = 160;           // steps without a better schedule before a restart
constexpr int kShakes = 10;           // random moves of a restart
constexpr int kReach = 16;            // longest move, in places
constexpr double kSame = 1e-12;       // relative: times that differ by less are equal but for rounding

}  // namespace

LocalSearch::LocalSearch(const Problem& problem, const Orders& orders)
    : problem_(&problem), timing_(problem), current_(orders), best_(orders), tabu_(kTenure) {
    best_makespan_ = makespan_ = timing_.run(current_);
}

bool LocalSearch::run(std::int64_t actions, double target) {
    const double initial = best_makespan_;
    const std::int64_t limit = simulated_actions() + actions;
    while (simulated_actions() < limit && best_makespan_ > target) {
        const Move move = best_move(false);
        if (move.stage >= 0) step(move);
        if (makespan_ < best_makespan_ * (1.0 - kSame)) {
            best_makespan_ = makespan_;
            best_ = current_;
            stalled_ = 0;
        } else if (++stalled_ >= kStall || move.stage < 0) {
            stalled_ = 0;
            shake();
        }
    }
    return best_makespan_ < initial;
}

void LocalSearch::shake() {
    current_ = best_;
    tabu_.assign(kTenure, Tabu{});
    makespan_ = timing_.run(current_);
    for (int count = 0; count < kShakes; ++count) {
        const Move move = best_move(true);
        if (move.stage < 0) return;
        step(move);
    }
}

void LocalSearch::step(const Move& move) {
    const auto begin = current_[move.stage].begin();
    const int low = std::min(move.from, move.to), high = std::max(move.from, move.to);
    const Order before(begin + low, begin + high + 1);
    // The new neighbours must not change places back.
    const Code moved = begin[move.from], passed = begin[move.to];
    if (move.from < move.to) {
        tabu_[next_tabu_] = {move.stage, moved, passed};
        std::rotate(begin + low, begin + low + 1, begin + high + 1);
    } else {
        tabu_[next_tabu_] = {move.stage, passed, moved};
        std::rotate(begin + low, begin + high, begin + high + 1);
    }
    next_tabu_ = (next_tabu_ + 1) % kTenure;
    makespan_ = timing_.run_moved(current_, move.stage, low, high);
    if (makespan_ == kNever) {  // a stage now waits for what it would only run later
        std::copy(before.begin(), before.end(), begin + low);
        makespan_ = timing_.run_moved(current_, move.stage, low, high);
    }
}

LocalSearch::Move LocalSearch::best_move(bool shaking) {
    Move best;
    const double critical = makespan_ * (1.0 - kSame);
    for (int stage = 0; stage < problem_->stages; ++stage) {
        const Order& order = current_[stage];
        const auto& start = timing_.start()[stage];
        const auto& end = timing_.end()[stage];
        const auto& left = timing_.left()[stage];
        double level = 0.0;
        int first = -1;  // of the critical block at hand
        const int length = static_cast<int>(order.size());
        level_.resize(length + 1);
        for (int position = 0; position <= length; ++position) {
            const bool is_critical = position < length && start[position] + left[position] >= critical;
            const bool adjacent = is_critical && first >= 0 && start[position] - end[position - 1] <= kSame * makespan_;
            if (first >= 0 && !adjacent) {
                consider_block(stage, first, position - 1, shaking, best);
                first = -1;
            }
            if (is_critical && first < 0) first = position;
            level_[position] = level;
            if (position < length) level += timing_.node(order[position], stage).taken;
        }
    }
    return best;
}

void LocalSearch::consider_block(int stage, int first, int last, bool shaking, Move& best) {
    for (int position = first; position < last; ++position) consider_move({stage, position, position + 1}, shaking, best);
    for (int reach = 2; reach <= std::min(kReach, last - first); ++reach) {
        consider_move({stage, first, first + reach}, shaking, best);
        consider_move({stage, first + reach, first}, shaking, best);
        if (reach == last - first) break;
        consider_move({stage, last - reach, last}, shaking, best);
        consider_move({stage, last, last - reach}, shaking, best);
    }
}

void LocalSearch::consider_move(const Move& move, bool shaking, Move& best) {
    if (!may_move(move) || !keeps_cap(move)) return;
    Move candidate = move;
    // Ties are common: breaking them at random keeps the search from running in circles.
    candidate.estimate = shaking ? random() : estimate(move, best.estimate) * (1.0 + 1e-6 * random());
    if (candidate.estimate >= best.estimate) return;
    if (!shaking && candidate.estimate >= best_makespan_ * (1.0 - kSame) && is_tabu(move)) return;
    best = candidate;
}

bool LocalSearch::may_move(const Move& move) const {
    const Order& order = current_[move.stage];
    const Code moved = order[move.from];
    for (int position = move.from; position != move.to;) {
        position += move.from < move.to ? 1 : -1;
        const bool later = move.from < move.to;
        const Code first = later ? moved : order[position], second = later ? order[position] : moved;
        if (!may_swap(first, second, move.stage)) return false;
    }
    return true;
}

bool LocalSearch::may_swap(Code first, Code second, int stage) const {
    const Kind kind = kind_of(first), other = kind_of(second);
    const bool same_chunk = problem_->chunk_in(first) == problem_->chunk_in(second);
    if (same_chunk && (kind == other || (sends_gradient(kind) && sends_gradient(other)))) return false;
    if (problem_->micro_batch_in(first) != problem_->micro_batch_in(second)) return true;
    const int v = problem_->virtual_stage(stage, problem_->chunk_in(first));
    if (!same_chunk) {  // what one makes for the other may stay on the stage
        const int step = problem_->virtual_stage(stage, problem_->chunk_in(second)) - v;
        return !(step == 1 && kind == kForward && other == kForward) &&
               !(step == -1 && sends_gradient(kind) && sends_gradient(other));
    }
    const bool last = v + 1 == problem_->virtual_stages();
    return !(kind == kBackwardInput && other == kBackwardWeight) && !(kind == kForward && last);
}


bool LocalSearch::keeps_cap(const Move& move) const {
    const double cap = problem_->cap[move.stage] + kCapTolerance;
    if (cap == kNever) return true;
    const Order& order = current_[move.stage];
    const bool later = move.from < move.to;
    const double taken = timing_.node(order[move.from], move.stage).taken, more = later ? -taken : taken;
    if (more <= 0.0) return true;  // others hold less meanwhile
    if (taken > 0.0 && level_[move.to] + taken > cap) return false;
    const int low = std::min(move.from + 1, move.to), high = std::max(move.from - 1, move.to);
    for (int position = low; position <= high; ++position) {
        const double others = timing_.node(order[position], move.stage).taken;
        if (others > 0.0 && level_[position] + more + others > cap) return false;
    }
    return true;
}

bool LocalSearch::is_tabu(const Move& move) const {
    const Order& order = current_[move.stage];
    const Code moved = order[move.from];
    return std::any_of(tabu_.begin(), tabu_.end(), [&](const Tabu& tabu) {
        if (tabu.stage != move.stage || (tabu.earlier != moved && tabu.later != moved)) return false;
        const bool later = move.from < move.to;
        const Code other = later ? tabu.earlier : tabu.later;
        if ((later ? tabu.later : tabu.earlier) != moved) return false;
        const auto low = order.begin() + std::min(move.from, move.to);
        const auto high = order.begin() + std::max(move.from, move.to) + 1;
        return std::find(low, high, other) != high;
    });
}

// The longest path through any of the shifted actions, with everything else where it was; of that which takes at least
// `enough`, any.
double LocalSearch::estimate(const Move& move, double enough) const {
    const Order& order = current_[move.stage];
    const int low = std::min(move.from, move.to), high = std::max(move.from, move.to);
    Code shifted[kReach + 1];
    double start[kReach + 1];
    const int count = high - low + 1;
    std::copy(order.begin() + low, order.begin() + high + 1, shifted);
    std::rotate(shifted, move.from < move.to ? shifted + 1 : shifted + count - 1, shifted + count);
    double now = low > 0 ? timing_.end()[move.stage][low - 1] : 0.0;
    for (int index = 0; index < count; ++index) {
        const Timing::Node& action = timing_.node(shifted[index], move.stage);
        start[index] = std::max(now, timing_.arrival(action));
        now = start[index] + action.seconds;
    }
    double rest = high + 1 < static_cast<int>(order.size()) ? timing_.left()[move.stage][high + 1] : 0.0;
    double longest = 0.0;
    for (int index = count - 1; index >= 0; --index) {
        const Timing::Node& action = timing_.node(shifted[index], move.stage);
        rest = action.seconds + std::max(rest, timing_.left_after(action));
        longest = std::max(longest, start[index] + rest);
        if (longest >= enough) break;
    }
    return longest;
}

double LocalSearch::random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return static_cast<double>(random_ >> 11) * 0x1p-53;
}

}  // namespace adaptra
