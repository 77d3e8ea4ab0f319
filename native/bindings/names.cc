#include "bindings/names.h"

#include <array>
#include <span>
#include <string_view>

#include "bindings/errors.h"

namespace flodl::bindings {
namespace {

template <typename Value>
struct Entry {
  std::string_view name;
  Value value;
};

constexpr std::array<Entry<DType>, 10> kDTypes = {{{"f32", DType::f32},
                                                   {"bf16", DType::bf16},
                                                   {"f16", DType::f16},
                                                   {"f64", DType::f64},
                                                   {"i64", DType::i64},
                                                   {"i32", DType::i32},
                                                   {"i16", DType::i16},
                                                   {"i8", DType::i8},
                                                   {"u8", DType::u8},
                                                   {"boolean", DType::boolean}}};
constexpr std::array<Entry<Rule>, 4> kRules = {{{"parameter", Rule::parameter},
                                                {"buffer", Rule::buffer},
                                                {"pooled_var", Rule::pooled_var},
                                                {"largest", Rule::largest}}};
constexpr std::array<Entry<OuterRule>, 3> kOuterRules = {
    {{"none", OuterRule::none}, {"nesterov", OuterRule::nesterov}, {"heavy_ball", OuterRule::heavy_ball}}};
constexpr std::array<Entry<MoveKind>, 3> kMoveKinds = {
    {{"copy", MoveKind::copy}, {"update", MoveKind::update}, {"read", MoveKind::read}}};

template <typename Value>
Value look_up(const char* what, std::span<const Entry<Value>> table, const std::string& name) {
  std::string known;
  for (const Entry<Value>& entry : table) {
    if (entry.name == name) return entry.value;
    known.append(known.empty() ? "" : ", ").append(entry.name);
  }
  raise({Code::invalid_argument, std::string(what) + " \"" + name + "\" is unknown; there are " + known});
}

}  // namespace

DType dtype_named(const std::string& name) { return look_up<DType>("dtype", kDTypes, name); }
Rule rule_named(const std::string& name) { return look_up<Rule>("rule", kRules, name); }
OuterRule outer_rule_named(const std::string& name) { return look_up<OuterRule>("outer rule", kOuterRules, name); }
MoveKind move_kind_named(const std::string& name) { return look_up<MoveKind>("pass", kMoveKinds, name); }

}  // namespace flodl::bindings
