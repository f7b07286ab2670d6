// Routes rows on the host: scores, groups, selection and weights by plain loops over `topk.h`.
//
// Any number of experts. A sum is the tree that the rule names, so that its bits are the GPU's.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "../topk.h"

namespace jax_pcie::cpu {

class RowRouter {
 public:
  explicit RowRouter(const RouteRule& rule)
      : rule_(rule), u_(rule.num_experts), keys_(rule.num_experts) {}

  // `logits` [experts] and `bias` [experts] or null -> `weights` [k], `ids` [k].
  void Route(const float* logits, const float* bias, float* weights, int32_t* ids) {
    Score(logits, bias);
    if (rule_.num_kept_groups < rule_.num_groups) KeepBestGroups();
    std::partial_sort(keys_.begin(), keys_.begin() + rule_.num_chosen, keys_.end(),
                      std::greater<>());
    float sum = 0.f;
    if (rule_.renormalize) {
      tree_.assign(TreePlaces(rule_.num_chosen), 0.f);
      for (int i = 0; i < rule_.num_chosen; ++i) tree_[i] = u_[IdOf(keys_[i])];
      sum = TreeSum();
    }
    for (int i = 0; i < rule_.num_chosen; ++i) {
      ids[i] = IdOf(keys_[i]);
      const float u = u_[ids[i]];
      weights[i] = MulRn(rule_.renormalize ? MulRn(u, Normaliser(sum)) : u, rule_.factor);
    }
  }

 private:
  void Score(const float* logits, const float* bias) {
    const int num = rule_.num_experts;
    if (rule_.scoring == Scoring::kSoftmax) {
      Softmax(logits);
    } else {
      for (int id = 0; id < num; ++id) u_[id] = IsFinite(logits[id]) ? Sigmoid(logits[id]) : 0.f;
    }
    for (int id = 0; id < num; ++id) {
      const float b = bias ? bias[id] : 0.f;
      if (IsFinite(logits[id]) && IsFinite(b)) {
        keys_[id] = KeyOf(OrderedBits(SelectionScore(u_[id], b)), id);
      } else {
        Exclude(id);
      }
    }
  }

  void Softmax(const float* logits) {
    const int num = rule_.num_experts;
    float largest = kLowest;
    for (int id = 0; id < num; ++id) {
      if (IsFinite(logits[id])) largest = Max(largest, logits[id]);
    }
    tree_.assign(TreePlaces(num), 0.f);
    for (int id = 0; id < num; ++id) {
      u_[id] = IsFinite(logits[id]) ? ExpOfDifference(logits[id], largest) : 0.f;
      tree_[id] = u_[id];
    }
    const float sum = TreeSum();
    for (int id = 0; id < num; ++id) {
      if (u_[id] > 0.f) u_[id] = DivRn(u_[id], sum);
    }
  }

  void Exclude(int id) {
    u_[id] = 0.f;
    keys_[id] = KeyOf(OrderedBits(kLowest), id);
  }

  void KeepBestGroups() {
    const int size = rule_.group_experts;
    std::vector<uint64_t> groups(rule_.num_groups);
    for (int group = 0; group < rule_.num_groups; ++group) {
      float best = kLowest, second = kLowest;
      for (int id = group * size; id < (group + 1) * size; ++id) {
        const float score = ScoreOf(keys_[id]);
        second = Max(second, Min(best, score));
        best = Max(best, score);
      }
      const float score = rule_.scores_groups_by_two() ? AddRn(best, second) : best;
      groups[group] = KeyOf(OrderedBits(score), group);
    }
    std::sort(groups.begin(), groups.end(), std::greater<>());
    for (int i = rule_.num_kept_groups; i < rule_.num_groups; ++i) {
      for (int j = 0; j < size; ++j) Exclude(IdOf(groups[i]) * size + j);
    }
  }

  float TreeSum() {
    for (size_t half = tree_.size() / 2; half > 0; half /= 2) {
      for (size_t i = 0; i < half; ++i) tree_[i] = AddRn(tree_[i], tree_[i + half]);
    }
    return tree_[0];
  }

  RouteRule rule_;
  std::vector<float> u_;        // [experts] what the chosen ones weigh
  std::vector<uint64_t> keys_;  // [experts]
  std::vector<float> tree_;
};

}  // namespace jax_pcie::cpu
