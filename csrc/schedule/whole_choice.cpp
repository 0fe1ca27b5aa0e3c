// SPDX-License-Identifier: Apache-2.0
#include "whole_choice.hpp"

namespace adaptra {
namespace {

constexpr double kSame = 1e-11;              // relative: times that differ by less are equal but for rounding
constexpr std::int64_t kTrialPasses = 150;   // of a trial, in replays of the whole schedule: about its seeds
constexpr double kTrialShare = 0.5;          // of the budget, for all trials

// Splitting pays where pipelines fill and drain, and costs whatever I and W take longer than B. So trials are over the
// number of backwards at the end of each stage that are split, first on all stages alike, then stage by stage.
class WholeChoice {
public:
    WholeChoice(const Problem& problem, double bound, std::int64_t budget)
        : problem_(problem), least_(least_whole(problem)), bound_(bound), budget_(budget) {}

    SearchResult run();

private:
    Whole with_split(int split) const;
    bool attempt(Whole whole, std::int64_t budget);
    bool spent() const { return simulated_ >= kTrialShare * budget_; }

    const Problem& problem_;
    const Whole least_;
    const double bound_;
    const std::int64_t budget_;
    std::int64_t simulated_ = 0;
    Whole whole_;
    SearchResult best_;
};

// What heads, tails and searches go by: the seconds of I and W, or of B where all backwards are whole.
Problem as_run(Problem problem, const Whole& whole) {
    for (std::size_t row = 0; row < problem.forward.size(); ++row) {
        if (whole[row / problem.chunks] < problem.micro_batches) continue;
        problem.backward_input[row] = problem.backward[row];
        problem.backward_weight[row] = 0.0;
    }
    problem.backward_differs = false;  // or bounds would ease I and W of the others
    return problem;
}

SearchResult WholeChoice::run() {
    const int count = problem_.micro_batches;
    const std::int64_t trial = kTrialPasses * actions_of(problem_, least_);
    attempt(with_split(0), trial);
    attempt(with_split(count), trial);
    for (int split = 1; split < count && !spent(); split += 1 + split / 2) attempt(with_split(split), trial);
    for (bool better = true; better && !spent();) {
        better = false;
        for (int stage = 0; stage < problem_.stages; ++stage) {
            for (int whole : {count, 0, whole_[stage] - 1, whole_[stage] + 1}) {
                Whole changed = whole_;
                changed[stage] = std::max(least_[stage], std::clamp(whole, 0, count));
                if (spent() || changed == whole_) continue;
                better |= attempt(changed, trial);
            }
        }
    }
    attempt(whole_, budget_ - simulated_);
    best_.simulated_actions = simulated_;
    return best_;
}

Whole WholeChoice::with_split(int split) const {
    Whole whole = least_;
    for (int& of_stage : whole) of_stage = std::max(of_stage, problem_.micro_batches - split);
    return whole;
}

bool WholeChoice::attempt(Whole whole, std::int64_t budget) {
    const SearchResult found = search(as_run(problem_, whole), whole, bound_, budget);
    simulated_ += found.simulated_actions;
    if (!whole_.empty() && found.makespan >= best_.makespan * (1.0 - kSame)) return false;
    best_ = found;
    whole_ = std::move(whole);
    return true;
}

bool whole_may_help(const Problem& problem) {
    for (std::size_t row = 0; row < problem.backward.size(); ++row) {
        if (problem.backward[row] < problem.backward_input[row] + problem.backward_weight[row]) return true;
    }
    return std::any_of(problem.released.begin(), problem.released.end(), [](double released) { return released < 0.0; });
}

}  // namespace

SearchResult search_any_split(const Problem& problem, bool may_split, double bound, std::int64_t budget) {
    if (may_split && whole_may_help(problem)) return WholeChoice(problem, bound, budget).run();
    return search(problem, Whole(problem.stages, may_split ? 0 : problem.micro_batches), bound, budget);
}

}  // namespace adaptra
