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
    const int low = this->low(move), high = this->high(move);
    const Order before(begin + low, begin + high + 1);
    // The new neighbours must not change places back.
    const Code moved = begin[move.from], passed = begin[move.to];
    tabu_[next_tabu_] = move.from <= move.to ? Tabu{move.stage, moved, passed} : Tabu{move.stage, passed, moved};
    apply(move, &*begin + low);
    if (move.from == move.to) tabu_[next_tabu_] = {move.stage, begin[low], begin[low + 1]};
    next_tabu_ = (next_tabu_ + 1) % kTenure;
    makespan_ = timing_.run_moved(current_, move.stage, low, high);
    if (makespan_ == kNever) {  // a stage now waits for what it would only run later
        std::copy(before.begin(), before.end(), begin + low);
        makespan_ = timing_.run_moved(current_, move.stage, low, high);
    }
}

int LocalSearch::high(const Move& move) const {
    const int last = std::max(move.from, move.to);
    return move.from == move.to ? last + 1 : last + unit_size(current_[move.stage][last]) - 1;
}

// Changes the codes from the lowest place on that the move concerns.
void LocalSearch::apply(const Move& move, Code* low) const {
    const int count = high(move) - this->low(move) + 1;
    if (move.from < move.to) {
        std::rotate(low, low + unit_size(*low), low + count);
    } else if (move.from > move.to) {
        std::rotate(low, low + (move.from - move.to), low + count);
    } else {
        if (move.turned) std::swap(low[0], low[1]);
        low[0] ^= kCombined;
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
    block_.clear();  // places at which something starts
    for (int position = first; position <= last; position += unit_size(current_[stage][position])) block_.push_back(position);
    const int count = static_cast<int>(block_.size());
    for (int index = 0; index + 1 < count; ++index) consider_move({stage, block_[index], block_[index + 1]}, shaking, best);
    for (int reach = 2; reach <= std::min(kReach, count - 1); ++reach) {
        consider_move({stage, block_[0], block_[reach]}, shaking, best);
        consider_move({stage, block_[reach], block_[0]}, shaking, best);
        if (reach == count - 1) break;
        consider_move({stage, block_[count - 1 - reach], block_[count - 1]}, shaking, best);
        consider_move({stage, block_[count - 1], block_[count - 1 - reach]}, shaking, best);
    }
    if (problem_->combined_saving.empty()) return;
    for (const int position : block_) consider_toggle(stage, position, shaking, best);
}

// Combining or separating, where neither half needs what the other makes.
void LocalSearch::consider_toggle(int stage, int position, bool shaking, Move& best) {
    const Order& order = current_[stage];
    if (position + 1 == static_cast<int>(order.size())) return;
    const Code code = order[position], behind = order[position + 1];
    if (unit_size(code) == 2) return consider_move({stage, position, position}, shaking, best);
    const bool turned = sends_gradient(kind_of(code)) && kind_of(behind) == kForward && unit_size(behind) == 1;
    const bool able = kind_of(code) == kForward && sends_gradient(kind_of(behind));
    if (!turned && !able) return;
    // A backward needs all forwards of its micro-batch, and each chunk's come in ascending order.
    const Code forward = turned ? behind : code, backward = turned ? code : behind;
    if (problem_->micro_batch_in(forward) <= problem_->micro_batch_in(backward)) return;
    consider_move({stage, position, position, turned}, shaking, best);
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
    if (move.from == move.to) return !move.turned || may_swap(order[move.from], order[move.from + 1], move.stage);
    const int size = unit_size(order[move.from]);
    const bool later = move.from < move.to;
    for (int moved = move.from; moved < move.from + size; ++moved) {
        for (int passed = later ? move.from + size : move.to; passed <= (later ? high(move) : move.from - 1); ++passed) {
            if (!may_swap(order[later ? moved : passed], order[later ? passed : moved], move.stage)) return false;
        }
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
    if (move.from == move.to || unit_size(order[move.from]) == 2) return keeps_cap_shifted(move, cap);
    const bool later = move.from < move.to;
    const double taken = timing_.node(order[move.from], move.stage).taken, more = later ? -taken : taken;
    if (more <= 0.0) return true;  // others hold less meanwhile
    if (taken > 0.0 && level_[move.to] + taken > cap) return false;
    const int low = std::min(move.from + 1, move.to), high = later ? this->high(move) : move.from - 1;
    for (int position = low; position <= high; ++position) {
        const double others = timing_.node(order[position], move.stage).taken;
        if (others > 0.0 && level_[position] + more + others > cap) return false;
    }
    return true;
}

bool LocalSearch::keeps_cap_shifted(const Move& move, double cap) const {
    double held = level_[low(move)];
    const auto begin = current_[move.stage].begin();
    Order shifted(begin + low(move), begin + high(move) + 1);
    apply(move, shifted.data());
    for (const Code code : shifted) {
        const double taken = timing_.node(code, move.stage).taken;
        held += taken;
        if (taken > 0.0 && held > cap) return false;
    }
    return true;
}

bool LocalSearch::is_tabu(const Move& move) const {
    const Order& order = current_[move.stage];
    const Code moved = order[move.from];
    if (move.from == move.to) {
        return std::any_of(tabu_.begin(), tabu_.end(), [&](const Tabu& tabu) {
            return tabu.stage == move.stage && tabu.earlier == moved && tabu.later == order[move.from + 1];
        });
    }
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
    const int stage = move.stage, low = this->low(move), high = this->high(move);
    Code shifted[2 * (kReach + 1)];
    double start[2 * (kReach + 1)];
    int first[kReach + 2];  // places in `shifted` at which something starts
    const int count = high - low + 1;
    std::copy(order.begin() + low, order.begin() + high + 1, shifted);
    apply(move, shifted);
    double now = low > 0 ? timing_.end()[stage][low - 1] : 0.0;
    int units = 0;
    for (int index = 0; index < count; index += unit_size(shifted[index])) {
        const int last = index + unit_size(shifted[index]) - 1;
        first[units++] = index;
        start[index] = std::max({now, timing_.arrival(timing_.node(shifted[index], stage)),
                                 timing_.arrival(timing_.node(shifted[last], stage))});
        now = start[index] + timing_.unit_seconds(stage, shifted[index], shifted[last]);
    }
    double rest = high + 1 < static_cast<int>(order.size()) ? timing_.left()[stage][high + 1] : 0.0;
    double longest = 0.0;
    while (units > 0) {
        const int index = first[--units], last = index + unit_size(shifted[index]) - 1;
        const double seconds = timing_.unit_seconds(stage, shifted[index], shifted[last]);
        const double message = std::max(timing_.left_after(timing_.node(shifted[index], stage)),
                                        timing_.left_after(timing_.node(shifted[last], stage)));
        rest = std::max(rest + seconds, message + timing_.share_sent(shifted[index]) * seconds);
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
